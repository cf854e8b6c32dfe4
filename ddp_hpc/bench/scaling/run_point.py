"""Runs one point of a scaling benchmark on this machine, in a session that ends with this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.process_status import process_stat

# Time for a launcher and its ranks to end after Ctrl-C.
_END_S = 10.0


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
