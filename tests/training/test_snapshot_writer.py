"""The thread that writes snapshots, as seen by the threads that wait for it at a failure."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from ddp_hpc.training.snapshots.snapshot_directory import SnapshotDirectory
from tests.training.streams import stream_of


def test_a_failure_between_the_creation_and_the_start_of_the_writer_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Once in CI: "RuntimeError: cannot join thread before it is started", from the failure watch's thread.
    directory = SnapshotDirectory(tmp_path, 2, lambda _: None, lambda _: None)
    start = threading.Thread.start
    finished: list[bool] = []

    def wait_then_start(thread: threading.Thread) -> None:
        if thread.name == "save":
            directory.finish_writing(0.1)
            finished.append((tmp_path / "step_00000001").exists())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", wait_then_start)
    values = stream_of({"w": torch.ones(8)})
    directory.save(1, {"step": 1}, values, values)
    directory.finish_writing(30)
    finished.append((tmp_path / "step_00000001").exists())
    directory.close()
    assert finished == [False, True]
