"""The watch of --idle-timeout in the supervisor, which also handles signals."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ddp_hpc.discovery.silence import Silence
from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.supervisor import external_program_state
from ddp_hpc.supervisor.external_program_state import Progress
from ddp_hpc.supervisor.idle_watch import IdleWatch
from ddp_hpc.supervisor.run_files import RunFiles
from tests.waiting import wait_until

WAIT_S = 60.0
ATTEMPT = Attempt(number=1, job_id="7", first_step=0, at_s=1700000000)


def test_signals_do_not_wait_for_a_slow_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []

    def look(_: Silence, *, is_active: bool) -> float:
        looks.append(is_active)
        return 0.0

    has_begun, may_end = threading.Event(), threading.Event()

    def slow_stat(_: str) -> int:
        has_begun.set()
        assert may_end.wait(WAIT_S)
        return 5

    monkeypatch.setattr(Silence, "look", look)
    watch = IdleWatch(1000.0, RunFiles(tmp_path / "run"), ATTEMPT, Progress(tmp_path / "progress"))
    monkeypatch.setattr(external_program_state, "_modified_ns", slow_stat)
    assert watch.hang() == ""
    assert has_begun.wait(WAIT_S)
    assert watch.hang() == ""  # it returns, so that the supervisor handles signals
    assert looks == [True]
    may_end.set()
    wait_until(lambda: looks == [True, True])  # it has found the checkpoint
    assert watch.hang() == ""
