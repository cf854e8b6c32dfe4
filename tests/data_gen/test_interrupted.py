"""Interrupted writes leave neither incomplete files nor leftovers, and failures are a single error."""

from __future__ import annotations

import filecmp
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import pytest
import torch
from safetensors import safe_open

from data_gen import Recipe, generate
from data_gen.formats import read_stamp
from ddp_hpc.base.errors import DdpHpcError, RequestError

SMALL = Recipe(num_samples=10, src_shape=(1, 8), tgt_shape=(3, 8))
# 690 MB: writing takes long enough to be interrupted, and little of it is written before.
LARGE = ("--num-samples", "16000", "--output", "file.h5")
# 129 MB: writing takes some tenths of a second.
KILLED = Recipe(num_samples=3000)


def partials(directory: Path) -> list[Path]:
    return [entry for entry in directory.iterdir() if entry.name.endswith(".partial")]


def wait_for_partial(directory: Path, process: subprocess.Popen[str]) -> None:
    limit_s = time.monotonic() + 30
    while not partials(directory):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < limit_s
        time.sleep(0.001)


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    """The complete file that the killed writers would have written."""
    return generate(KILLED, tmp_path_factory.mktemp("whole") / "file.h5").path


def writers_of(path: Path) -> list[int]:
    """Returns the IDs of the Python processes that write `path`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if arguments[0] == os.fsencode(sys.executable) and os.fsencode(path) in arguments:
            found.append(int(entry.parent.name))
    return sorted(found)


@pytest.mark.parametrize(
    "number", [*range(2), *(pytest.param(number, marks=pytest.mark.soak) for number in range(2, 55))]
)
def test_a_killed_writer_leaves_no_file_that_looks_complete(tmp_path, launch, whole_file, number):
    chance = random.Random(number)
    path = tmp_path / "file.h5"
    command = [sys.executable, "-m", "data_gen", "--num-samples", str(KILLED.num_samples), "--output", path]
    process = launch.start(command)
    # Most of the time passes after the partial file was created; a tenth of the kills happen before.
    if chance.random() < 0.9:
        while not (partials(tmp_path) or path.exists()):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.4))
    else:
        time.sleep(chance.uniform(0, 0.5))
    for writer in writers_of(path):
        os.kill(writer, signal.SIGKILL)
    launch.end(process)
    assert writers_of(path) == []
    if path.exists():  # The process was killed after renaming the file, which must then be complete.
        assert filecmp.cmp(path, whole_file, shallow=False)
    for left in partials(tmp_path):
        assert not opens(left, ".h5") or filecmp.cmp(left, whole_file, shallow=False)
    generate(KILLED, path)
    assert filecmp.cmp(path, whole_file, shallow=False)
    assert list(tmp_path.iterdir()) == [path]


def opens(path: Path, suffix: str) -> bool:
    """Returns whether the library of that format can open the file."""
    try:
        if suffix == ".h5":
            h5py.File(path).close()
        elif suffix == ".pt":
            torch.load(path, weights_only=True, mmap=True)
        else:
            with safe_open(path, framework="np") as file:
                file.get_slice("src")
    except Exception:  # each library raises its own exceptions
        return False
    return True


@pytest.mark.parametrize("suffix", [".h5", ".pt", ".safetensors"])
def test_an_unfinished_file_cannot_be_opened(tmp_path, suffix):
    seen: list[bool] = []

    def look(done: int, total: int) -> None:
        (partial,) = partials(tmp_path)
        seen.append(opens(partial, suffix))

    path = generate(SMALL, tmp_path / f"file{suffix}", progress=look).path
    assert opens(path, suffix)
    assert seen == [False, False]


@pytest.mark.parametrize("exception", ["KeyboardInterrupt", "SystemExit"])
def test_a_signal_that_arrives_in_a_callback_of_a_weak_reference_is_not_lost(exception):
    program = f"""
import signal, sys, time, weakref
from data_gen import cli

def interrupted(_):
    raise {exception}

signal.signal(signal.SIGINT, lambda *_: sys.exit(3))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
sys.unraisablehook = cli.send_again
objects = [set()]
reference = weakref.ref(objects[0], interrupted)
objects.clear()
time.sleep(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=50
    )
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130)],
)
def test_a_signal_removes_what_was_written(tmp_path, generator, signum, code):
    with generator(*LARGE) as process:
        wait_for_partial(tmp_path, process)
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=30)
    assert "Traceback" not in stderr
    assert partials(tmp_path) == []
    path = tmp_path / "file.h5"
    # On a busy machine, the signal may arrive after the file has been renamed, or after the end.
    assert process.returncode in ((code, 0) if path.exists() else (code,))
    if path.exists():
        assert [array.name for array in read_stamp(path, ".h5")[1]] == ["src", "tgt"]


def test_an_exception_leaves_no_partial_file_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "file.h5"
    path.write_bytes(b"the old one")

    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        generate(SMALL, path, force=True, progress=fail)
    assert path.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_other_hosts_are_removed_an_hour_after_the_last_write(tmp_path, monkeypatch):
    now_s = time.time()
    ages_s = {1: 3700, 2: 3500, 3: 0}
    left = {pid: tmp_path / f".old.h5.data_gen-other-{pid}.1.x00000000.partial" for pid in ages_s}
    for pid, path in left.items():
        path.write_bytes(b"x")
        os.utime(path, (now_s, now_s - ages_s[pid]))
    # The clock of this host is a day ahead of that of the file system.
    monkeypatch.setattr(time, "time", lambda: now_s + 86_400)
    generate(SMALL, tmp_path / "file.h5")
    assert [pid for pid, path in left.items() if path.exists()] == [2, 3]


def test_a_failed_write_is_one_error(tmp_path, run_generator):
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))}
    done = run_generator("--num-samples", "200", "--output", "data/file.h5", **limit)
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
    mount_point = tmp_path / "tiny"
    mount_point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount_point)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a file system of 1 MiB requires root: {mounted.stderr.strip()}")
    yield mount_point
    subprocess.run(["umount", str(mount_point)], check=True)


def test_too_little_space_is_reported_before_anything_is_written(tiny_disk):
    with pytest.raises(RequestError) as caught:
        generate(Recipe(), tiny_disk / "file.h5")
    assert "needs 84.1 MiB" in str(caught.value)
    assert "1.0 MiB free" in str(caught.value)
    assert list(tiny_disk.iterdir()) == []


@pytest.mark.parametrize("suffix", [".h5", ".pt", ".safetensors"])
def test_a_disk_that_fills_up_while_writing_is_one_error(tiny_disk, monkeypatch, suffix):
    free = shutil.disk_usage("/")._replace(free=2**40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(DdpHpcError) as caught:
        generate(Recipe(), tiny_disk / f"file{suffix}")
    assert caught.value.exit_code == 1
    assert "No space left on device" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tiny_disk.iterdir()) == []


def test_concurrent_writers_leave_one_complete_file(tmp_path, generator):
    processes = [generator("--num-samples", "500", "--output", "file.h5") for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    for process in processes:
        process.communicate()
    assert list(tmp_path.iterdir()) == [tmp_path / "file.h5"]
    with h5py.File(tmp_path / "file.h5") as file:
        assert file["tgt"][-1].min() > 0
