"""Whether a job script would resume or overwrite the run of another program in its run directory."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.run_state import RunState, read_state
from ddp_hpc.lint.parse_script import parse_script, read_script
from ddp_hpc.queue.submission_ledger import JOB, submissions
from ddp_hpc.request.program import Program, program_of


def last_script(run_dir: Path) -> str:
    """Returns the script of the last job of a run, which may still be pending; empty if it is unknown."""
    paths = [(submission.at_s, Path(submission.script)) for submission in submissions(run_dir)]
    started = run_dir / JOB
    with suppress(OSError):
        paths.append((int(started.stat().st_mtime), started))
    for _, path in sorted(paths, reverse=True):
        with suppress(OSError, RequestError):
            return read_script(path, str(path))
    return ""


def check_program(run_dir: Path, before: str, now: str, remedy: str) -> None:
    """Checks that the run in a directory is one of the program that the script `now` starts.

    `before` is the script of the last job of the run. A run that has failed without a snapshot leaves nothing
    that another program could overwrite.

    Raises:
        RequestError: the directory contains the run of another program.
    """
    old, new, state = _program_in(before), _program_in(now), _state(run_dir)
    has_run = state is not None and (not state.state.is_failure or state.step > 0)
    if has_run and old is not None and new is not None and old != new:
        raise RequestError(
            f"{run_dir} contains the run of another program, {old.name}, which {new.name} cannot resume and "
            f"might overwrite; {remedy}"
        )


def warning_about(run_dir: Path, now: str, remedy: str) -> str:
    """Returns a warning if a directory contains a run that the script `now` would not resume as intended.

    This is the case for a run of another command, and for a complete run. Returns an empty string in all
    other cases.

    Raises:
        RequestError: the directory contains the run of another program.
    """
    state, before = _state(run_dir), last_script(run_dir)
    check_program(run_dir, before, now, f"for a new run, {remedy}")
    step = f"step {state.step}" if state and state.step else ""
    if state:
        about = ", ".join(filter(None, (state.state, step)))
    else:
        about = next((f"job {submission.job_id}" for submission in reversed(submissions(run_dir))), "")
    old, new = _command(before), _command(now)
    if about and old and new and old != new:
        return (
            f"{run_dir} contains the run of another command, {old} ({about}), which this job would resume "
            f"or overwrite; for a new run, {remedy}"
        )
    if state and state.state.is_complete:
        return f"the run in {run_dir} is complete{f' ({step})' if step else ''}; for a new run, {remedy}"
    return ""


def _state(run_dir: Path) -> RunState | None:
    with suppress(DdpHpcError):
        return read_state(run_dir)
    return None


def _command(text: str) -> str:
    """Returns the command that the launcher of a script starts; empty if it is unknown."""
    launches = parse_script(text).launches()
    return shlex.join(word for word in launches[-1].launched if word != "$@") if launches else ""


def _program_in(text: str) -> Program | None:
    script = parse_script(text)
    launches = script.launches() or list(filter(None, [script.supervised]))
    program = program_of(launches[-1].launched or launches[-1].argv) if launches else None
    return program._replace(name=os.path.normpath(program.name), python="") if program else None
