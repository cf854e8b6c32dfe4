"""The snapshot directory of a run: retention, resuming, and errors of the disk."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_hpc.base.errors import DataError
from ddp_hpc.training.snapshots import snapshot_directory as snapshots
from ddp_hpc.training.snapshots.snapshot_directory import SnapshotDirectory
from ddp_hpc.training.snapshots.snapshot_files import _sealed, complete_snapshot, read_snapshot
from tests.training.streams import stream_of

from .forked import Forks
from .runs import LINEAR

MODEL = "model-00000.safetensors"
FOREIGN = "was not written by ddp-hpc"


@dataclass
class Run:
    """A directory, the messages about it, and the steps reported as complete."""

    folder: SnapshotDirectory
    said: list[str] = field(default_factory=list)
    complete: list[int] = field(default_factory=list)

    def save(self, *steps: int, num_values: int = 8) -> None:
        for step in steps:
            values = {"w": torch.full((num_values,), float(step))}
            self.folder.save(step, {"step": step}, stream_of(values), stream_of(values))
        self.folder.wait()


@pytest.fixture
def open_run() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def one(path: Path, keep: int = 2) -> Run:
        said: list[str] = []
        complete: list[int] = []
        runs.append(Run(SnapshotDirectory(path, keep, said.append, complete.append), said, complete))
        return runs[-1]

    yield one
    for run in runs:
        run.folder.close()


def _steps(folder: Path) -> list[int]:
    """All entries of the directory except the lock, which must be complete snapshots."""
    found = sorted(entry.name for entry in folder.iterdir() if entry.name != ".lock")
    for name in found:
        assert read_snapshot(folder / name).model["w"][0] == int(name[5:])
    return [int(name[5:]) for name in found]


def _damage(folder: Path, step: int) -> None:
    (folder / f"step_{step:08d}" / MODEL).write_bytes(b"x")


def _content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_the_newest_snapshots_are_kept_and_the_newest_is_resumed(
    tmp_path: Path, open_run: Callable[..., Run]
) -> None:
    run = open_run(tmp_path, keep=2)
    assert run.folder.newest_valid() is None
    run.save(1, 2, 3, 9, 10)
    assert _steps(tmp_path) == [9, 10]
    assert run.complete == [1, 2, 3, 9, 10]
    assert run.said == []
    run.folder.close()
    again = open_run(tmp_path)
    snapshot = again.folder.newest_valid()
    assert snapshot is not None
    assert snapshot.about["step"] == 10
    assert again.folder.saved.step == 10


def test_a_damaged_snapshot_is_skipped_with_a_warning_and_later_replaced(
    tmp_path: Path, open_run: Callable[..., Run]
) -> None:
    open_run(tmp_path).save(4, 10)
    _damage(tmp_path, 10)
    run = _again(open_run, tmp_path, keep=1)
    before = _content(tmp_path)
    snapshot = run.folder.newest_valid()
    assert snapshot is not None
    assert snapshot.about["step"] == 4
    [words] = run.said
    assert words.startswith(f"warning: {tmp_path}/step_00000010/{MODEL} has 1 bytes")
    assert "trying the previous snapshot" in words
    assert _content(tmp_path) == before
    run.save(5)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "step_00000005", "step_00000010"}
    run.save(10)
    assert _steps(tmp_path) == [10]


def _again(open_run: Callable[..., Run], folder: Path, keep: int = 2) -> Run:
    """Opens another run in a directory whose lock was released."""
    (folder / ".lock").unlink()
    return open_run(folder, keep)


def test_if_all_snapshots_are_damaged_nothing_is_deleted(
    tmp_path: Path, open_run: Callable[..., Run]
) -> None:
    open_run(tmp_path).save(1, 2)
    for step in (1, 2):
        _damage(tmp_path, step)
    run = _again(open_run, tmp_path)
    before = _content(tmp_path)
    with pytest.raises(DataError, match=r"none of its 2 snapshots is valid\. Nothing was deleted"):
        run.folder.newest_valid()
    assert _content(tmp_path) == before
    assert [words.split(":")[0] for words in run.said] == ["warning"] * 2


def test_the_state_is_copied_at_once_and_the_next_save_waits(
    tmp_path: Path, open_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def slow(*args: Any) -> Path:
        assert go.wait(10)
        return complete_snapshot(*args)

    monkeypatch.setattr(snapshots, "complete_snapshot", slow)
    run = open_run(tmp_path)
    weights = torch.full((8,), 1.0)
    run.folder.save(1, {}, stream_of({"w": weights}), stream_of({"w": weights}))
    weights.fill_(2.0)  # the training continues
    assert run.complete == []
    threading.Timer(0.1, go.set).start()
    waited: list[int] = []
    run.folder.save(
        2, {}, stream_of({"w": weights}), stream_of({"w": weights}), tick=lambda: waited.append(1)
    )
    assert run.complete[:1] == [1]
    assert waited, "a rank that waits for its disk reports progress"
    run.folder.wait()
    assert _steps(tmp_path) == [1, 2]


def test_a_full_disk_is_a_warning_and_existing_snapshots_are_kept(
    tiny_disk: Path, open_run: Callable[..., Run]
) -> None:
    run = open_run(tiny_disk, keep=3)
    quarter = 2**18 // 8  # two files of 128 KiB
    run.save(1, 2, num_values=quarter)
    (tiny_disk / "others.bin").write_bytes(bytes(2**18 + 2**16))
    run.save(3, num_values=quarter)
    [words] = run.said
    assert words.startswith(f"WARNING: the snapshot of step 3 (256.0 KiB) was NOT saved in {tiny_disk}: ")
    assert "No space left on device; the newest snapshot is still from step 2. Training continues" in words
    assert run.folder.saved.step == 2
    (tiny_disk / "others.bin").unlink()
    assert _steps(tiny_disk) == [1, 2]
    run.save(4, num_values=quarter)
    assert _steps(tiny_disk) == [1, 2, 4]
    assert run.complete == [1, 2, 4]
    run.folder.close()


def _failing(errors: list[int]) -> Callable[..., Path]:
    """A `complete_snapshot` that first fails with these errors."""

    def write(*args: Any) -> Path:
        if errors:
            code = errors.pop(0)
            raise OSError(code, os.strerror(code))
        return complete_snapshot(*args)

    return write


def test_transient_errors_are_retried(
    tmp_path: Path, open_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_RETRY_AFTER_S", (0.01, 0.02, 0.03))
    monkeypatch.setattr(snapshots, "complete_snapshot", _failing([errno.EIO, errno.ESTALE]))
    run = open_run(tmp_path)
    run.save(1)
    assert _steps(tmp_path) == [1]
    assert run.said == [
        "warning: the snapshot of step 1 cannot be written (Input/output error); retrying in 0.01 s",
        "warning: the snapshot of step 1 cannot be written (Stale file handle); retrying in 0.02 s",
    ]
    monkeypatch.setattr(snapshots, "complete_snapshot", _failing([errno.EIO] * 4))
    run.save(2, 3)
    assert _steps(tmp_path) == [1, 3]
    assert [words.split(":")[0] for words in run.said[2:]] == ["warning"] * 3 + ["WARNING"]


def test_the_next_run_removes_only_leftovers_of_a_killed_writer(
    tmp_path: Path, open_run: Callable[..., Run]
) -> None:
    for name in (".step_00000003.99.partial", ".step_00000002.99.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MODEL).write_bytes(b"half")
    kept = [tmp_path / name for name in ("notes.txt", ".mine.partial", "step_00000007.partial")]
    for path in kept:
        path.mkdir()
    open_run(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", *(path.name for path in kept)}


def test_a_run_that_lost_its_directory_does_not_write_to_it(
    tmp_path: Path, open_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(tmp_path)
    run.save(1)
    monkeypatch.setattr(run.folder._lock, "lost", True)
    run.save(2)
    [words] = run.said
    assert "another job took over the directory" in words
    assert words.endswith("stop one of the two jobs")
    assert _steps(tmp_path) == [1]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("position", {"step": "1"}, FOREIGN),
        # The name of the directory is compared with the step first.
        ("position", {"step": -1}, "none of its 1 snapshots is valid"),
        ("lr_ranks", float("nan"), FOREIGN),
        ("global_batch", "9" * 5000, FOREIGN),
    ],
)
def test_a_run_does_not_resume_from_invalid_contents(
    tmp_path: Path, forks: Forks, name: str, value: object, said: str
) -> None:
    words = [*LINEAR, "--num-samples", "8", "--max-steps", "1", "--snapshot-dir", "run"]
    forks.run(*words, cwd=tmp_path, ranks=1)
    manifest = tmp_path / "run" / "step_00000001" / "snapshot.json"
    about = json.loads(manifest.read_text())
    del about["sha256"]
    manifest.write_bytes(
        _sealed({**about, name: {**about[name], **value} if isinstance(value, dict) else value})
    )
    job = forks.start(*words, cwd=tmp_path, ranks=1)
    assert job.wait() == [2]
    (line,) = job.errors()
    assert said in line
    assert "Traceback" not in job.words()
