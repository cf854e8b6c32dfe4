"""One running job per snapshot directory: live holders on any host are respected, dead ones do not block."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ddp_hpc.base.errors import DataError
from ddp_hpc.training.snapshots import directory_lock as directory_lock
from ddp_hpc.training.snapshots.directory_lock import DirectoryLock
from tests.conftest import Launch

HOLD = """
import sys, time
from pathlib import Path
from ddp_hpc.training.snapshots.directory_lock import DirectoryLock
from tests.waiting import PATIENCE
lock = DirectoryLock(Path(sys.argv[1]), print)
print("held", flush=True)
time.sleep(60)
"""
STALE_S = 0.3


@pytest.fixture
def take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], DirectoryLock]]:
    """Takes the lock on `tmp_path/run`; earlier messages are in `.said`."""
    monkeypatch.setattr(directory_lock, "_SETTLE_S", 0.05)  # nobody else takes it
    taken: list[DirectoryLock] = []

    def one() -> DirectoryLock:
        taken.append(DirectoryLock(tmp_path / "run", said.append, STALE_S))
        return taken[-1]

    said: list[str] = []
    one.said = said  # type: ignore[attr-defined]
    yield one
    for lock in taken:
        lock.release()


def _lock_of_another_host(folder: Path, **more: object) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / ".lock"
    words = {
        "nonce": "theirs",
        "home": "n7-1",
        "pid": os.getpid(),
        "host": "n7",
        "job": "4711",
        "started": "1",
    }
    path.write_text(json.dumps(words | more))
    return path


def test_a_directory_is_locked_and_released_without_leftovers(
    tmp_path: Path, take: Callable[[], DirectoryLock]
) -> None:
    take().release()
    assert list((tmp_path / "run").iterdir()) == []
    take()


def test_a_second_holder_is_rejected_immediately_with_process_host_and_job(
    tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = launch.start([sys.executable, "-c", HOLD, tmp_path], env={"SLURM_JOB_ID": "4711"})
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    before = (tmp_path / ".lock").read_bytes()
    with pytest.raises(DataError) as caught:
        DirectoryLock(tmp_path, pytest.fail)  # without a wait
    words = f"is in use by job 4711 (PID {holder.pid} on {os.uname().nodename}); wait until that job ends"
    assert words in str(caught.value)
    assert (tmp_path / ".lock").read_bytes() == before
    # A killed holder needs no wait.
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    DirectoryLock(tmp_path, pytest.fail).release()
    assert not (tmp_path / ".lock").exists()


def test_the_stale_lock_of_another_host_is_taken_over_after_an_announced_wait(
    tmp_path: Path, take: Callable[[], DirectoryLock]
) -> None:
    _lock_of_another_host(tmp_path / "run")
    began_s = time.monotonic()
    take()
    assert time.monotonic() - began_s > STALE_S
    assert take.said == [  # type: ignore[attr-defined]
        f"waiting 0.3 s to check whether job 4711 (PID {os.getpid()} on n7) still uses {tmp_path}/run"
    ]


@pytest.mark.parametrize(
    ("earlier", "environ", "waits"),
    [
        ({"job": "7", "start": ""}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, False),
        ({"job": "7", "start": "1"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ({"job": "8", "start": ""}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ({"job": "12.srv", "start": "A0"}, {"PBS_JOBID": "12.srv", "PBS_JOBCOOKIE": "B1"}, False),
        ({"job": "12.srv", "start": "A0"}, {"PBS_JOBID": "12.srv", "PBS_JOBCOOKIE": "A0"}, True),
        ({"job": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ({"job": "", "start": ""}, {}, True),
    ],
)
def test_a_requeued_job_does_not_wait_for_its_own_earlier_start(
    tmp_path: Path,
    take: Callable[[], DirectoryLock],
    monkeypatch: pytest.MonkeyPatch,
    earlier: dict[str, str],
    environ: dict[str, str],
    waits: bool,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    _lock_of_another_host(tmp_path / "run", **earlier)
    take()
    assert bool(take.said) is waits  # type: ignore[attr-defined]


def test_a_lock_that_another_host_updates_is_respected(tmp_path: Path) -> None:
    path = _lock_of_another_host(tmp_path / "run", job="")
    before = path.read_bytes()
    touch = threading.Timer(0.1, os.utime, [path])
    touch.start()
    with pytest.raises(DataError, match=r"is in use by another run \(PID \d+ on n7\)"):
        DirectoryLock(tmp_path / "run", lambda _: None, stale_s=60.0)
    touch.join()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"pid": "x"}', b"\xff", b"[" * 100_000], ids=range(7)
)
def test_a_lock_with_invalid_content_has_an_unknown_holder(
    tmp_path: Path, take: Callable[[], DirectoryLock], content: bytes
) -> None:
    _lock_of_another_host(tmp_path / "run").write_bytes(content)
    take()
    assert "(PID " in take.said[0]  # type: ignore[attr-defined]


@pytest.mark.check
def test_only_one_of_many_takes_over_the_lock_of_a_dead_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_lock, "_SETTLE_S", 3.0)  # threads on a busy machine can be late
    _lock_of_another_host(tmp_path)
    got: list[DirectoryLock] = []
    refused: list[DataError] = []

    def want() -> None:
        try:
            got.append(DirectoryLock(tmp_path, lambda text: None, STALE_S))
        except DataError as error:
            refused.append(error)

    threads = [threading.Thread(target=want) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 5)
    got[0].release()
    assert list(tmp_path.iterdir()) == []


def test_the_holder_updates_its_lock_and_detects_its_loss(
    tmp_path: Path, take: Callable[[], DirectoryLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_lock, "TOUCH_S", 0.05)
    lock = take()
    path = tmp_path / "run" / ".lock"
    os.utime(path, (1, 1))
    _until(lambda: path.stat().st_mtime > 1)
    assert not lock.lost
    _lock_of_another_host(tmp_path / "run")
    _until(lambda: lock.lost)
    lock.release()
    assert "theirs" in path.read_text(), "what is another's now stays"


def test_releasing_a_lock_does_not_count_as_losing_it(
    tmp_path: Path, take: Callable[[], DirectoryLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_lock, "TOUCH_S", 0.01)
    lock = take()
    looks, looked = threading.Event(), threading.Event()
    is_ours = lock._is_ours

    def slow() -> bool:
        if threading.current_thread() is not threading.main_thread():
            looks.set()
            assert looked.wait(10)
        return is_ours()

    monkeypatch.setattr(lock, "_is_ours", slow)
    assert looks.wait(10)
    lock.release()
    looked.set()
    time.sleep(0.1)
    assert not lock.lost


def _until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_directory_without_write_permission_is_rejected(
    open_folder: Path, as_nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    open_folder.chmod(0o555)
    with as_nobody():
        for folder in (open_folder, open_folder / "below"):
            with pytest.raises(DataError, match=r"cannot write to --snapshot-dir .*Permission denied"):
                DirectoryLock(folder, pytest.fail)
    assert list(open_folder.iterdir()) == []
