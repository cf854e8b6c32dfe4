"""The exit code and the message for an error, and its traceback.

This module does not import torch, because it also handles errors that occur before torch is imported.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
from pathlib import Path

from ddp_hpc.base.errors import EXIT_FAILED, EXIT_INTERRUPTED, DdpHpcError, RendezvousError
from ddp_hpc.base.user_code_exceptions import (
    describe_error,
    traceback_of,
    write_traceback,
)
from ddp_hpc.training.run.parts import Parts

SIGTERM_EXIT = 128 + signal.SIGTERM


def verdict(error: BaseException, parts: Parts, timeout_s: float) -> tuple[int, str]:
    """Returns the exit code and the message for an error."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else EXIT_FAILED
        if code - 128 in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            name = signal.Signals(code - 128).name
            return code, f"stopped by {name} (scancel, qdel, the time limit, or the launcher)"
        if isinstance(error.code, str):  # sys.exit("message") has exit code 1
            return EXIT_FAILED, error.code
        return code, f"a rank called sys.exit with exit code {code}"
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted"
    if "is killed by signal: Terminated" in str(error):
        # A worker process (--workers) received the SIGTERM of the job shortly before this process.
        return verdict(SystemExit(SIGTERM_EXIT), parts, timeout_s)
    if isinstance(error, DdpHpcError):
        text = str(error)
        return error.exit_code, _at(error, text, whole=False) if error.traceback_text else text
    if text := _known_error(error, parts, timeout_s):
        return EXIT_FAILED, text
    if parts.in_script:
        return EXIT_FAILED, traceback_of(_without_context_managers(error)).rstrip()
    return EXIT_FAILED, _at(error, describe_error(error), whole=True)


def _known_error(error: BaseException, parts: Parts, timeout_s: float) -> str:
    """Describes an exception that the exit of another process has caused, in one line; empty for all other
    exceptions.
    """
    if "ddp_hpc.training.input.batch_loader" in sys.modules:
        from ddp_hpc.training.input.batch_loader import explain_lost_worker

        if text := explain_lost_worker(error):
            return text
    if parts.watch is not None:
        from ddp_hpc.training.process_group.failure_watch import explain_lost_contact

        if text := explain_lost_contact(error, timeout_s):
            gone = parts.heartbeat.gone_ranks() if parts.heartbeat is not None else ""
            return f"{gone} is gone: {text}" if gone else text
    return ""


def _at(error: BaseException, text: str, *, whole: bool) -> str:
    """Prepends the notes that the loop added to the error: the step and, if `whole`, the samples."""
    notes = getattr(error, "__notes__", [])
    where = ", ".join(notes if whole else notes[:1])
    return f"{where}: {text}" if where else text


def traceback_text_of(error: BaseException, parts: Parts, timeout_s: float) -> str:
    """Returns the traceback to write to a file for an unexpected exception, a bug here or in user code."""
    if isinstance(error, DdpHpcError):
        return error.traceback_text
    if parts.in_script or not isinstance(error, Exception) or _known_error(error, parts, timeout_s):
        return ""
    return traceback_of(_without_context_managers(error))


def with_traceback(text: str, traceback_text: str, parts: Parts) -> str:
    """Appends the name of the traceback's file; appends the traceback itself if it cannot be written."""
    if not traceback_text:
        return text
    run = os.environ.get("DDP_HPC_RUN_DIR", "")
    directory = parts.tracebacks or (Path(run) / "tracebacks" if run else None)
    rank = parts.world.rank if parts.world is not None else 0
    try:
        path = write_traceback(traceback_text, directory, f"rank{rank:05d}.txt")
    except OSError as error:
        return f"error: {text}; cannot write its traceback ({error.strerror}):\n{traceback_text.rstrip()}"
    return f"{text}; the traceback is in {path}"


def _without_context_managers(error: BaseException) -> BaseException:
    """Removes the context managers around the body of the `with` from the traceback of the error."""
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_flags & inspect.CO_GENERATOR:
        inner = inner.tb_next
    return error.with_traceback(inner or error.__traceback__)


def is_lost_contact(error: BaseException, timeout_s: float) -> bool:
    """Returns whether the exit of another process has caused this error."""
    if "torch" not in sys.modules:
        return False
    from ddp_hpc.training.process_group.failure_watch import explain_lost_contact

    return isinstance(error, RendezvousError) or bool(explain_lost_contact(error, timeout_s))
