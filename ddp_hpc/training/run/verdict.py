"""What an error means for the run: the cause of its end, the exit code, the message, and the traceback.

This module does not import torch, because it also handles errors that occur before torch is imported.
"""

from __future__ import annotations

import inspect
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.base.user_code_exceptions import (
    describe_error,
    traceback_of,
    write_traceback,
)
from ddp_hpc.training.process_group.errors_of_torch import (
    explain_lost_contact,
    explain_lost_worker,
    known_cause,
    known_error,
)
from ddp_hpc.training.run.parts import Parts


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What an error means for the run. `text` is the message, and `traceback_text` goes to a file."""

    cause: Cause
    exit_code: int
    text: str
    traceback_text: str = ""


def verdict(error: BaseException, parts: Parts, timeout_s: float) -> Verdict:
    """Returns the cause of the end, the exit code and the message for an error."""
    if isinstance(error, SystemExit):
        return _of_exit(error)
    if isinstance(error, KeyboardInterrupt):
        return _of(Cause.INTERRUPTED, "interrupted")
    if isinstance(error, DdpHpcError):
        own = known_cause(error) or error.cause
        text = str(error) if own is type(error).cause else _with_advice(str(error), own)
        text = _at(error, text, whole=False) if error.traceback_text else text
        return _of(own, text, error.traceback_text)
    if lost := _lost_process(error, parts, timeout_s):
        return lost
    cause = known_cause(error)
    trace = traceback_of(_without_context_managers(error)).rstrip()
    text = trace if parts.in_script else _at(error, describe_error(error), whole=cause is None)
    text = text if cause is None else _with_advice(text, cause)
    keeps_trace = isinstance(error, Exception) and not parts.in_script
    return _of(cause or Cause.FAILED, text, trace if keeps_trace else "")


def _with_advice(text: str, cause: Cause) -> str:
    """Appends what to do to the last line, unless the text contains it."""
    return text if cause.advice in text else f"{text}; {cause.advice}"


def _of(cause: Cause, text: str, traceback_text: str = "") -> Verdict:
    return Verdict(cause=cause, exit_code=cause.exit_code, text=text, traceback_text=traceback_text)


def _of_exit(error: SystemExit) -> Verdict:
    """Returns the verdict on a rank that exits: by `on_signal`, or because a program calls sys.exit."""
    code = error.code if isinstance(error.code, int) else Cause.FAILED.exit_code
    if code - 128 in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        text = (
            f"stopped by {signal.Signals(code - 128).name} (scancel, qdel, the time limit, or the launcher)"
        )
        return Verdict(cause=Cause.SIGNALLED, exit_code=code, text=text)
    if isinstance(error.code, str):  # sys.exit("message") has exit code 1
        return _of(Cause.FAILED, error.code)
    cause = Cause.REFUSED if code == Cause.REFUSED.exit_code else Cause.FAILED
    return Verdict(cause=cause, exit_code=code, text=f"a rank called sys.exit with exit code {code}")


def _lost_process(error: BaseException, parts: Parts, timeout_s: float) -> Verdict | None:
    """Returns the verdict on an exception of torch that the end of another process has caused, in one line;
    None for all other exceptions.
    """
    if text := explain_lost_worker(error):
        by_sigterm = known_error(error).cause is Cause.SIGNALLED
        return _of_exit(SystemExit(128 + signal.SIGTERM)) if by_sigterm else _of(Cause.FAILED, text)
    if parts.watch is not None and (text := explain_lost_contact(error, timeout_s)):
        gone = parts.heartbeat.gone_ranks() if parts.heartbeat is not None else ""
        return _of(Cause.LOST_RANK, f"{gone} is gone: {text}" if gone else text)
    return None


def _at(error: BaseException, text: str, *, whole: bool) -> str:
    """Adds the notes of the loop to the error: the step before it and, if `whole`, the samples after it."""
    step, *samples = getattr(error, "__notes__", []) or [""]
    after = f", {', '.join(samples)}" if samples and whole else ""
    return f"{step}: {text}{after}" if step else text


def with_traceback(text: str, traceback_text: str, parts: Parts) -> str:
    """Appends the name of the traceback's file; appends the traceback itself if it cannot be written."""
    if not traceback_text:
        return text
    run = os.environ.get("DDP_HPC_RUN_DIR", "")
    rank = parts.world.rank if parts.world is not None else 0
    try:
        path = write_traceback(traceback_text, parts.run_dir or (Path(run) if run else None), rank)
    except OSError as error:
        return f"error: {text}; cannot write its traceback ({error.strerror}):\n{traceback_text.rstrip()}"
    return f"{text}; the traceback is in {path}"


def _without_context_managers(error: BaseException) -> BaseException:
    """Removes the context managers around the body of the `with` from the traceback of the error."""
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_flags & inspect.CO_GENERATOR:
        inner = inner.tb_next
    return error.with_traceback(inner or error.__traceback__)
