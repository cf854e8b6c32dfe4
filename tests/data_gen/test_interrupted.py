"""A write that does not come to its end: no half file, no leftovers, one clear error."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import h5py
import pytest

from data_gen import Recipe, generate, writer
from data_gen.formats import read_stamp
from ddp_hpc.errors import DdpHpcError, RequestError

SMALL = Recipe(num_samples=10, src_shape=(1, 8), tgt_shape=(3, 8))
# 690 MB: long enough to be hit, and hardly any of it is written before that.
LARGE = ("--num-samples", "16000", "--output", "file.h5")
DEAD_PID = 2**22 + 1  # above the kernel's largest


def partials(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.name.endswith(".partial")]


def wait_for_partial(folder: Path, process: subprocess.Popen[str]) -> None:
    limit_s = time.monotonic() + 30
    while not partials(folder):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < limit_s
        time.sleep(0.001)


@pytest.mark.parametrize("number", range(5))
def test_a_killed_writer_leaves_nothing_that_looks_finished(tmp_path, generator, number):
    with generator(*LARGE) as process:
        wait_for_partial(tmp_path, process)
        time.sleep(random.Random(number).uniform(0, 0.15))
        process.kill()
    path = tmp_path / "file.h5"
    if path.exists():  # The kill came after the rename: then everything is there.
        stamp = read_stamp(path, ".h5")
        assert path.stat().st_size >= stamp.end
    else:
        assert len(partials(tmp_path)) == 1
    generate(SMALL, tmp_path / "next.h5")
    assert partials(tmp_path) == []


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP), (signal.SIGINT, 130)],
)
def test_a_signal_removes_what_was_written(tmp_path, generator, signum, code):
    with generator(*LARGE) as process:
        wait_for_partial(tmp_path, process)
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in stderr
    assert partials(tmp_path) == []
    path = tmp_path / "file.h5"
    if path.exists():  # On a busy machine the signal may come after the rename: then everything is there.
        assert path.stat().st_size >= read_stamp(path, ".h5").end


def test_a_signal_that_the_program_handles_stays_the_programs(tmp_path):
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    try:
        path = tmp_path / "file.h5"
        result = generate(SMALL, path, progress=lambda *_: signal.raise_signal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen
    assert not result.reused


def test_handlers_are_given_back(tmp_path):
    generate(SMALL, tmp_path / "file.h5")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_exception_on_the_way_leaves_nothing_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "file.h5"
    path.write_bytes(b"the old one")

    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        generate(SMALL, path, force=True, progress=fail)
    assert path.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_only_leftovers_of_dead_writers_of_this_host_are_removed(tmp_path):
    host = socket.gethostname()
    dead = tmp_path / f".old.h5.data_gen-{host}-{DEAD_PID}.partial"
    kept = [
        tmp_path / f".old.h5.data_gen-{host}-{os.getppid()}.partial",
        tmp_path / f".old.h5.data_gen-other{host}-{DEAD_PID}.partial",
        tmp_path / f"old.h5.data_gen-{host}-{DEAD_PID}.partial",
        tmp_path / ".mine.partial",
    ]
    for path in [dead, *kept]:
        path.write_bytes(b"x")
    generate(SMALL, tmp_path / "file.h5")
    assert not dead.exists()
    assert all(path.exists() for path in kept)


@pytest.mark.parametrize("suffix", [".h5", ".pt", ".safetensors"])
def test_a_write_that_the_kernel_refuses_is_one_error(tmp_path, run_generator, suffix):
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))}
    done = run_generator("--num-samples", "200", "--output", f"data/file{suffix}", **limit)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "writing" not in line] == [
        done.stderr.splitlines()[-1]
    ]
    assert "error: " in done.stderr
    assert "was not written" in done.stderr
    assert list((tmp_path / "data").iterdir()) == []


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a file system of 1 MiB needs root and the right to mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_too_small_is_refused_before_anything_is_written(tiny_disk):
    with pytest.raises(RequestError) as caught:
        generate(Recipe(), tiny_disk / "file.h5")
    assert "needs 84.1 MiB" in str(caught.value)
    assert "1.0 MiB free" in str(caught.value)
    assert list(tiny_disk.iterdir()) == []


@pytest.mark.parametrize("suffix", [".h5", ".pt", ".safetensors"])
def test_a_disk_that_fills_up_on_the_way_is_one_error(tiny_disk, monkeypatch, suffix):
    free = shutil.disk_usage("/")._replace(free=2**40)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda folder: free)
    with pytest.raises(DdpHpcError) as caught:
        generate(Recipe(), tiny_disk / f"file{suffix}")
    assert caught.value.exit_code == 1
    assert "No space left on device" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tiny_disk.iterdir()) == []


def test_a_folder_that_may_not_be_written_is_one_error(open_folder, as_nobody):
    open_folder.chmod(0o555)
    with as_nobody(), pytest.raises(DdpHpcError, match="Permission denied"):
        generate(SMALL, open_folder / "file.h5")
    assert list(open_folder.iterdir()) == []


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path, generator):
    processes = [generator("--num-samples", "500", "--output", "file.h5") for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    for process in processes:
        process.communicate()
    assert list(tmp_path.iterdir()) == [tmp_path / "file.h5"]
    with h5py.File(tmp_path / "file.h5") as file:
        assert file["tgt"][-1].min() > 0
