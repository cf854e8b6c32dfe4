"""Partial files: every target has a hidden name, and only files of ended writers are removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.base.atomic_files import (
    move_into_place,
    partial_file,
    process_home,
    remove_leftovers,
    write_atomically,
)
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.process_status import is_gone, process_started
from ddp_hpc.base.run_outcomes import State
from ddp_hpc.base.run_state import RunState, read_state, write_state
from tests.conftest import clean_environ

DEAD_PID = 2**22 + 1  # above the kernel's largest


def left_by_a_dead_writer(folder: Path, name: str = "a.h5") -> Path:
    with partial_file(folder / name, "test") as partial:
        left = partial.with_name(partial.name.replace(f"-{os.getpid()}.", f"-{DEAD_PID}."))
    left.write_bytes(b"x")
    return left


@pytest.mark.parametrize("name", ["x" * 255, "\u00e9" * 127, "\U0001f600" * 63, "\udcff" * 255])
def test_the_longest_name_has_a_unique_hidden_name(tmp_path: Path, name: str) -> None:
    with (
        partial_file(tmp_path / name, "test") as partial,
        partial_file(tmp_path / (name[:-1] + "z"), "test") as other,
    ):
        partial.write_bytes(b"x")
        assert partial != other
        partial.replace(tmp_path / name)
    left_by_a_dead_writer(tmp_path, name)
    remove_leftovers(tmp_path, "test")
    assert list(tmp_path.iterdir()) == [tmp_path / name]


def test_an_error_of_the_block_is_not_hidden_by_one_of_the_cleanup(tmp_path: Path) -> None:
    def fail() -> None:
        with partial_file(tmp_path / "a", "test") as partial:
            partial.mkdir()  # cannot be unlinked
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_a_process_id_of_another_container_is_ignored(tmp_path: Path) -> None:
    """In a container with the host's name the same process id can belong to another process."""
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    ours = left_by_a_dead_writer(tmp_path)
    theirs = ours.with_name(ours.name.replace(str(namespace), str(namespace + 1)))
    assert theirs != ours
    theirs.write_bytes(b"x")
    remove_leftovers(tmp_path, "test")
    assert list(tmp_path.iterdir()) == [theirs]


def test_an_existing_file_is_replaced_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError

    partial, target = tmp_path / "partial", tmp_path / "target"
    partial.write_bytes(b"new")
    target.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        move_into_place(partial, target, replace=False)
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", no_links)
        with pytest.raises(FileExistsError):
            move_into_place(partial, target, replace=False)
    assert target.read_bytes() == b"old"
    move_into_place(partial, target, replace=True)
    assert target.read_bytes() == b"new"


# Each program writes a file of its kind to the current directory.
WRITERS = {
    "state": (
        "from ddp_hpc.base.run_outcomes import State\n"
        "from ddp_hpc.base.run_state import RunState, write_state\n"
        "write_state(Path(), RunState(State.DONE, 1, ''))"
    ),
    "lock": (
        "from ddp_hpc.training.snapshots.directory_lock import DirectoryLock\n"
        "Path('.lock').write_text('{\"home\": \"elsewhere\"}')\n"
        "DirectoryLock(Path(), print, stale_s=0.1)"
    ),
}


def run_writer(program: str, folder: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-c", f"import os, signal\nfrom pathlib import Path\n{program}\n"],
        cwd=folder,
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode


@pytest.mark.parametrize("kind", WRITERS)
def test_leftovers_of_a_killed_writer_are_removed_by_the_next_one(tmp_path: Path, kind: str) -> None:
    killed = f"os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n{WRITERS[kind]}"
    assert run_writer(killed, tmp_path) == -signal.SIGKILL
    assert [entry.suffix for entry in tmp_path.iterdir() if entry.name != ".lock"] == [".partial"]
    assert run_writer(WRITERS[kind], tmp_path) == 0
    assert [entry.name for entry in tmp_path.iterdir() if entry.suffix == ".partial"] == []


def test_a_kill_during_the_writing_of_the_state_keeps_the_old_one(tmp_path: Path) -> None:
    write_state(tmp_path, RunState(State.RUNNING, 10, ""))
    killed = f"os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n{WRITERS['state']}"
    assert run_writer(killed, tmp_path) == -signal.SIGKILL
    assert read_state(tmp_path) == RunState(State.RUNNING, 10, "")


def test_a_file_that_this_process_is_writing_is_kept(tmp_path: Path) -> None:
    """Two threads write the same kind of file, as the heartbeat's thread also writes the state."""
    with partial_file(tmp_path / "a", "test") as partial:
        partial.write_bytes(b"x")
        write_atomically(tmp_path / "b", b"", "test")
        with partial_file(tmp_path / "a", "test") as other:
            assert other != partial
        assert partial.exists()


def test_a_process_that_got_the_id_of_a_killed_writer_is_not_the_writer(tmp_path: Path) -> None:
    with partial_file(tmp_path / "a", "test") as own:
        started = process_started(os.getpid())
        earlier = own.with_name(own.name.replace(f".{started}.", f".{int(started) - 100}."))
    earlier.write_bytes(b"x")
    remove_leftovers(tmp_path, "test")
    assert not earlier.exists()


def test_a_killed_writer_counts_as_ended_while_its_memory_is_freed(tmp_path: Path) -> None:
    """A killed rank that was still freeing its memory counted as running after its launcher had ended."""
    hold = "import sys; held = bytearray(b'x') * 2**29; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        started = process_started(writer.pid)
        left = tmp_path / f".a.h5.test-{process_home()}-{writer.pid}.{started}.x00000000.partial"
        left.write_bytes(b"x")
        remove_leftovers(tmp_path, "test")
        assert left.exists()
        writer.kill()
        remove_leftovers(tmp_path, "test")
        assert not left.exists()
        assert is_gone(writer.pid, started)


# The threads compute without Python's lock, so most of them run when the process exits.
BUSY_THREADS = """
import hashlib, os, threading
content = bytes(50_000_000)
for _ in range(40):
    threading.Thread(target=lambda: [hashlib.sha256(content) for _ in range(100)], daemon=True).start()
print(end="x", flush=True)
input()
os._exit(0)
"""


def test_a_process_whose_first_thread_has_exited_counts_as_ended() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", BUSY_THREADS], stdin=pipe, stdout=pipe) as writer:
        assert writer.stdin
        assert writer.stdout
        writer.stdout.read(1)
        assert process_started(writer.pid)
        writer.stdin.write(b"\n")
        writer.stdin.flush()
        command = Path(f"/proc/{writer.pid}/cmdline")
        while command.read_bytes():  # it is empty as soon as the first thread has released the memory
            pass
        assert process_started(writer.pid) == ""


def test_a_process_that_proc_hides_does_not_count_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """proc(5), hidepid=2: common on login nodes."""
    monkeypatch.setattr("ddp_hpc.base.process_status.process_stat", lambda *_: [])
    child = os.fork()
    if child == 0:
        if os.getuid() == 0:
            os.setuid(65534)
        os._exit(is_gone(1, "100"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_symbolic_link_in_place_of_a_partial_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory that others can write to, they can create a link with a guessed name."""
    monkeypatch.setattr(os, "urandom", bytes)
    (tmp_path / "precious").write_bytes(b"mine")
    with partial_file(tmp_path / "a", "test") as partial:
        pass
    partial.symlink_to(tmp_path / "precious")
    with pytest.raises(DdpHpcError, match="cannot be written"):
        write_atomically(tmp_path / "a", b"new", "test")
    assert (tmp_path / "precious").read_bytes() == b"mine"
