"""The watch of --idle-timeout in the supervisor, which also handles signals."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.supervisor import external_program_state
from ddp_hpc.supervisor.external_program_state import Progress
from ddp_hpc.supervisor.idle_watch import IdleWatch
from ddp_hpc.supervisor.run_files import RunFiles

LIMIT_S, WAIT_S = 1000.0, 30.0
ATTEMPT = Attempt(number=1, job_id="7", first_step=0, at_s=1700000000)


def test_signals_do_not_wait_for_a_slow_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RunFiles(tmp_path / "run")
    watch = IdleWatch(LIMIT_S, files, ATTEMPT, Progress(tmp_path / "progress"))
    (files.path / "activity").touch()
    has_begun, may_end = threading.Event(), threading.Event()

    def slow_stat(path: str) -> int:
        has_begun.set()
        assert may_end.wait(WAIT_S)
        return 5

    monkeypatch.setattr(external_program_state, "_modified_ns", slow_stat)
    now_s = time.monotonic()
    for _ in range(40):  # the limit has passed
        now_s += 31.0
        monkeypatch.setattr(time, "monotonic", lambda: now_s)
        assert watch.hang() == ""
    assert has_begun.wait(WAIT_S)
    before_ns = (files.path / "activity").stat().st_mtime_ns
    monkeypatch.undo()
    may_end.set()
    for walk in (thread for thread in threading.enumerate() if "_find_newest" in thread.name):
        walk.join(WAIT_S)
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 31.0)
    assert watch.hang() == ""
    assert (files.path / "activity").stat().st_mtime_ns > before_ns  # it has found a checkpoint
