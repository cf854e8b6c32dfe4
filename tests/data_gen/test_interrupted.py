"""A write that does not come to its end: no half file, no leftovers, one clear error."""

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
from data_gen.partial import WRITER
from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.partial_files import partial_file
from tests.conftest import PROJECT

SMALL = Recipe(num_samples=10, src_shape=(1, 8), tgt_shape=(3, 8))
# 690 MB: long enough to be hit, and hardly any of it is written before that.
LARGE = ("--num-samples", "16000", "--output", "file.h5")
# 129 MB: some tenths of a second.
KILLED = Recipe(num_samples=3000)
DEAD_PID = 2**22 + 1  # above the kernel's largest


def partials(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.name.endswith(".partial")]


def wait_for_partial(folder: Path, process: subprocess.Popen[str]) -> None:
    limit_s = time.monotonic() + 30
    while not partials(folder):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < limit_s
        time.sleep(0.001)


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    """What the file of the killed writers is to be."""
    return generate(KILLED, tmp_path_factory.mktemp("whole") / "file.h5").path


def writers_of(path: Path) -> list[int]:
    """Process ids of the Pythons that write `path`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] == os.fsencode(sys.executable) and os.fsencode(path) in words:
            found.append(int(entry.parent.name))
    return sorted(found)


@pytest.mark.parametrize(
    "number", [*range(5), *(pytest.param(number, marks=pytest.mark.soak) for number in range(5, 55))]
)
def test_a_killed_writer_leaves_nothing_that_looks_finished(tmp_path, launch, mpiexec, whole_file, number):
    chance = random.Random(number)
    path = tmp_path / "file.h5"
    command = [sys.executable, "-m", "data_gen", "--num-samples", str(KILLED.num_samples), "--output", path]
    several = [mpiexec, "-n", "2"] if number % 2 else []
    process = launch.start([*several, *command])
    # Most of the time is spent after the partial file is there; a tenth of the kills come before.
    if chance.random() < 0.9:
        while not (partials(tmp_path) or path.exists()):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.4))
    else:
        time.sleep(chance.uniform(0, 0.5))
    if alive := writers_of(path):
        os.kill(chance.choice(alive), signal.SIGKILL)
    launch.end(process)
    assert writers_of(path) == []
    if path.exists():  # The kill came after the rename: then everything is there.
        assert filecmp.cmp(path, whole_file, shallow=False)
    for left in partials(tmp_path):
        assert not opens(left, ".h5") or filecmp.cmp(left, whole_file, shallow=False)
    generate(KILLED, path)
    assert filecmp.cmp(path, whole_file, shallow=False)
    assert list(tmp_path.iterdir()) == [path]


def opens(path: Path, suffix: str) -> bool:
    """Whether the library of that format takes the file for one of its own."""
    try:
        if suffix == ".h5":
            h5py.File(path).close()
        elif suffix == ".pt":
            torch.load(path, weights_only=True, mmap=True)
        else:
            with safe_open(path, framework="np") as file:
                file.get_slice("src")
    except Exception:  # each library has its own
        return False
    return True


@pytest.mark.parametrize("suffix", [".h5", ".pt", ".safetensors"])
def test_a_file_in_the_making_opens_as_nothing(tmp_path, suffix):
    seen: list[bool] = []

    def look(done: int, total: int) -> None:
        (partial,) = partials(tmp_path)
        seen.append(opens(partial, suffix))

    path = generate(SMALL, tmp_path / f"file{suffix}", progress=look).path
    assert opens(path, suffix)
    assert seen == [False, False]


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
        assert [array.name for array in read_stamp(path, ".h5")[1]] == ["src", "tgt"]


def test_a_job_that_is_ended_removes_what_its_ranks_wrote(tmp_path, launch, mpiexec):
    process = launch.start([mpiexec, "-n", "2", sys.executable, "-m", "data_gen", *LARGE], cwd=tmp_path)
    wait_for_partial(tmp_path, process)
    process.terminate()
    assert launch.end(process).exit_code != 0
    assert partials(tmp_path) == []


def test_a_second_signal_does_not_end_the_wait_for_the_other_ranks():
    """Slurm sends TERM twice; a rank that goes first has its launcher kill rank 0, which cleans up."""
    words = "with end_by_signal(lambda: time.monotonic() > end): print(flush=True); time.sleep(60)"
    program = f"import time; from data_gen.partial import end_by_signal; end = time.monotonic() + 2\n{words}"
    began_s = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", program], cwd=PROJECT, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.terminate()
        time.sleep(0.3)
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
    assert time.monotonic() - began_s > 2


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


def leftover(folder: Path, pid: int) -> Path:
    """What another process of this host would call its partial file."""
    with partial_file(folder / "old.h5", WRITER) as own:
        return own.with_name(own.name.replace(f"-{os.getpid()}.", f"-{pid}."))


def test_only_leftovers_of_dead_writers_are_removed(tmp_path):
    dead = leftover(tmp_path, DEAD_PID)
    kept = [
        leftover(tmp_path, os.getppid()),
        dead.with_name(dead.name.replace("data_gen-", "data_gen-other")),
        dead.with_name(dead.name.removeprefix(".")),
        tmp_path / ".mine.partial",
    ]
    for path in [dead, *kept]:
        path.write_bytes(b"x")
    generate(SMALL, tmp_path / "file.h5")
    assert not dead.exists()
    assert all(path.exists() for path in kept)


def test_a_writer_that_was_killed_and_nobody_has_waited_for_is_dead_too(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as writer:
        left = leftover(tmp_path, writer.pid)
        left.write_bytes(b"x")
        generate(SMALL, tmp_path / "file.h5")
        assert left.exists()
        writer.kill()
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)  # ended, and still a zombie
        generate(SMALL, tmp_path / "other.h5")
        assert not left.exists()


def test_leftovers_of_other_hosts_are_removed_an_hour_after_the_last_write(tmp_path, monkeypatch):
    now_s = time.time()
    ages_s = {1: 3700, 2: 3500, 3: 0}
    left = {pid: tmp_path / f".old.h5.data_gen-other-{pid}.partial" for pid in ages_s}
    for pid, path in left.items():
        path.write_bytes(b"x")
        os.utime(path, (now_s, now_s - ages_s[pid]))
    # This host's clock is a day ahead of the file system's.
    monkeypatch.setattr(time, "time", lambda: now_s + 86_400)
    generate(SMALL, tmp_path / "file.h5")
    assert [pid for pid, path in left.items() if path.exists()] == [2, 3]


def test_leftovers_that_may_not_be_removed_hinder_nobody(open_folder, as_nobody):
    open_folder.chmod(0o1777)
    left = leftover(open_folder, DEAD_PID)
    left.write_bytes(b"x")
    with as_nobody():
        generate(SMALL, open_folder / "file.h5")
    assert (open_folder / "file.h5").exists()


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
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
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
