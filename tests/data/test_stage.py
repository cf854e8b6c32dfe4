"""Copies on node-local storage are verified and reused, and never disturb existing files."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_hpc.data import staging as stage
from ddp_hpc.data.staging import NotStagedError, stage_file
from tests.conftest import Launch

DiskUsage = namedtuple("DiskUsage", "total used free")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of slightly more than two blocks with different contents."""
    path = tmp_path / "lustre" / "train.h5"
    path.parent.mkdir()
    path.write_bytes(os.urandom(2 * stage._BLOCK_BYTES + 12345))
    return path


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The directory for the copies, which does not exist yet."""
    return tmp_path / "node" / "local"


def refusal(source: Path, local: Path, **options: object) -> str:
    """Returns the reason why staging failed; no files are left, and the source is unchanged."""
    before = source.read_bytes()
    with pytest.raises(NotStagedError) as caught:
        stage_file(source, local, **options)
    assert not local.is_dir() or list(local.iterdir()) == []
    assert source.read_bytes() == before
    return str(caught.value)


def test_the_copy_has_the_bytes_of_the_file_and_its_suffix(source: Path, local: Path) -> None:
    staged = stage_file(source, local)
    assert staged.path.parent == local
    assert staged.path.name.startswith("train-")
    assert staged.path.suffix == ".h5"
    assert staged.path.read_bytes() == source.read_bytes()
    assert (staged.reused, staged.num_bytes) == (False, source.stat().st_size)
    assert list(local.iterdir()) == [staged.path]


def test_only_its_owner_may_read_the_copy(source: Path, local: Path) -> None:
    source.chmod(0o644)
    assert stat.S_IMODE(stage_file(source, local).path.stat().st_mode) == 0o600


def test_a_second_run_reuses_the_copy(source: Path, local: Path) -> None:
    first = stage_file(source, local)
    made = first.path.stat()
    second = stage_file(source, local)
    assert second.path == first.path
    assert second.reused
    assert second.path.stat().st_mtime_ns == made.st_mtime_ns


def test_a_file_reached_by_a_link_is_the_same_file(source: Path, local: Path, tmp_path: Path) -> None:
    (tmp_path / "train.h5").symlink_to(source)
    assert stage_file(source, local).path == stage_file(tmp_path / "train.h5", local).path


def test_a_file_that_was_rewritten_gets_a_new_copy(source: Path, local: Path) -> None:
    first = stage_file(source, local)
    source.write_bytes(b"other bytes")
    second = stage_file(source, local)
    assert second.path != first.path
    assert second.path.read_bytes() == b"other bytes"


def test_a_truncated_or_modified_copy_is_replaced(source: Path, local: Path) -> None:
    path = stage_file(source, local).path
    os.truncate(path, 100)
    assert not stage_file(source, local).reused
    with path.open("r+b") as file:
        file.write(bytes(4096))
    assert not stage_file(source, local).reused
    assert path.read_bytes() == source.read_bytes()


def test_a_copy_that_another_job_finished_first_is_kept(source: Path, local: Path) -> None:
    """If it were replaced, its readers would report that their data changed."""
    path = stage_file(source, local).path
    path.rename(local / "theirs")
    inode = (local / "theirs").stat().st_ino

    def finish_the_other(done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes:
            (local / "theirs").rename(path)

    assert stage_file(source, local, progress=finish_the_other).path == path
    assert path.stat().st_ino == inode
    assert list(local.iterdir()) == [path]


def test_a_link_under_the_copys_name_is_not_followed(source: Path, local: Path, tmp_path: Path) -> None:
    """In /tmp, any user may create a file of any name."""
    path = stage_file(source, local).path
    path.unlink()
    planted = tmp_path / "planted"
    planted.write_bytes(bytes(source.stat().st_size))
    path.symlink_to(planted)
    assert stage_file(source, local).path.read_bytes() == source.read_bytes()
    assert not path.is_symlink()
    assert planted.read_bytes() == bytes(source.stat().st_size)


def test_a_file_that_does_not_fit_is_not_copied(
    source: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(10**9, 10**9, 3 * 2**20))
    reason = refusal(source, local)
    # 16 MiB of data and a margin for others who write there.
    assert reason == f"{local} has 3.0 MiB free, but 80.2 MiB are required"


@pytest.fixture
def small_files() -> Iterator[None]:
    """A limit that is reached half-way, as on a disk that fills up meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (stage._BLOCK_BYTES + 5, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_half_way_leaves_nothing(source: Path, local: Path, small_files: None) -> None:
    assert "File too large" in refusal(source, local)


def test_a_directory_that_cannot_be_created_is_reported(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory" in refusal(source, tmp_path / "file" / "local")
    assert "File exists" in refusal(source, tmp_path / "file")


def test_a_file_that_changes_while_it_is_copied_is_not_used(source: Path, local: Path) -> None:
    def touch(done_bytes: int, total_bytes: int) -> None:
        os.utime(source, ns=(0, done_bytes))

    assert "changed while it was copied" in refusal(source, local, progress=touch)


def test_a_file_that_grows_without_end_ends_the_copy(source: Path, local: Path) -> None:
    size = source.stat().st_size

    def grow(done_bytes: int, total_bytes: int) -> None:
        assert done_bytes <= size + stage._BLOCK_BYTES
        os.truncate(source, source.stat().st_size + 2 * stage._BLOCK_BYTES)

    with pytest.raises(NotStagedError, match="changed while it was copied"):
        stage_file(source, local, progress=grow)
    assert list(local.iterdir()) == []


def test_a_copy_that_reads_back_differently_is_not_used(source: Path, local: Path) -> None:
    def damage(done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes:
            (partial,) = local.iterdir()
            with partial.open("r+b") as file:
                byte = file.read(1)[0]
                file.seek(0)
                file.write(bytes([byte ^ 1]))

    assert "differs" in refusal(source, local, progress=damage)


def test_a_signal_leaves_nothing(tmp_path: Path, local: Path, launch: Launch) -> None:
    """SIGTERM is converted to an exception, as in training."""
    source = tmp_path / "large.h5"
    source.touch()
    os.truncate(source, 2**31)  # hardly any of it is written before the signal
    program = (
        "import pathlib, signal, sys\n"
        "from ddp_hpc.data.staging import stage_file\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "stage_file(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
    )
    process = launch.start([sys.executable, "-c", program, source, local])
    while not (local.is_dir() and list(local.iterdir())):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.001)
    process.terminate()
    assert launch.end(process).exit_code == 143
    assert list(local.iterdir()) == []


def test_progress_is_reported_per_block_and_ends_with_the_total(source: Path, local: Path) -> None:
    reported: list[tuple[int, int]] = []
    stage_file(source, local, progress=lambda *numbers: reported.append(numbers))
    size = source.stat().st_size
    assert reported == [(stage._BLOCK_BYTES, size), (2 * stage._BLOCK_BYTES, size), (size, size)]


def test_a_directory_in_which_others_may_replace_the_copy_is_rejected(source: Path, local: Path) -> None:
    local.mkdir(parents=True)
    local.chmod(0o777)
    assert "use a directory that belongs to you" in refusal(source, local)
    local.chmod(0o1777)  # as /tmp is
    assert stage_file(source, local).path.exists()
