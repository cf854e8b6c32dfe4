"""Runs one point of a scaling benchmark in its directory, and in a session that ends with this process."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.process_status import process_stat
from ddp_hpc.bench.scaling.points import LOG, METRICS, SUMMARY, TRACES

# Time for a launcher and its ranks to end after Ctrl-C.
_END_S = 10.0
_COMMAND, _LOCK = "command.txt", ".scaling.lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Locks the directory for the block against other processes on this machine that run points in it.

    Raises:
        RequestError: another process holds the lock, or the directory is not writable.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RequestError(
            f"cannot write to --dir {directory} ({error.strerror}); use another directory"
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise RequestError(
            f"--dir {directory} is in use by another ddp-hpc bench scaling; wait until that has ended, "
            "or use another directory"
        ) from None
    finally:
        os.close(handle)


def is_finished(directory: Path, command: str) -> bool:
    """Returns whether the directory of a point has results of `command`.

    Raises:
        RequestError: it has results of another command.
    """
    if not (directory / SUMMARY).exists():
        return False
    try:
        before = (directory / _COMMAND).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        before = "an unknown command"
    if before != command:
        raise RequestError(
            f"{directory} has the results of: {before}; this request would run: {command}. Use the same "
            "options as before, or another --dir."
        )
    return True


def empty_point(directory: Path, command: str = "") -> None:
    """Creates the directory of a point for `command`, and removes the files of an earlier attempt from it.

    Raises:
        DdpHpcError: the file system returned an error.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in (SUMMARY, METRICS, LOG, _COMMAND):
            (directory / name).unlink(missing_ok=True)
        if (directory / TRACES).is_dir():
            shutil.rmtree(directory / TRACES)
        if command:
            (directory / _COMMAND).write_text(command, encoding="utf-8")
    except OSError as error:
        raise DdpHpcError(f"cannot prepare the directory {directory} for a run") from error


def run_point(argv: Sequence[str], environ: Mapping[str, str], log: Path) -> int:
    """Runs the launcher `argv` with its output and that of its ranks in `log`, and returns its exit code.

    Ctrl-C and SIGTERM terminate all processes of the launcher.

    Raises:
        DdpHpcError: the launcher cannot be started, or the log cannot be written.
    """
    # If this process runs in a job, the run directory of the job must not be used for the point.
    own = {name: value for name, value in environ.items() if name != "DDP_HPC_RUN_DIR"}
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=own,
                start_new_session=True,
            )
    except OSError as error:
        raise DdpHpcError(
            f"cannot start the training: {error.filename or argv[0]}: {error.strerror}; check the launcher"
        ) from error
    try:
        with _sigterm_exits():
            return process.wait()
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    finally:  # a second Ctrl-C ends the wait above at once
        # Launchers start ranks in separate process groups, but in the same session.
        for path in Path("/proc").glob("[0-9]*"):
            if process_stat(int(path.name))[3:4] == [str(process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(int(path.name), signal.SIGKILL)
        process.wait()


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
