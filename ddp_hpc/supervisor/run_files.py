"""The files in the run directory that control a job and its successors.

`state` is written by the trainer (see `run_state`), `attempts` contains one line per start of a job,
`ATTEMPT JOBID STEP UNIX_S`, and `job.sh` is the script that another job needs to resume the run. `cancelled`
contains the jobs that `ddp-hpc cancel` has ended. `resume` contains the command that resumes the run if no
job that does is known to be queued. `attempt_end` describes the files about the end of an attempt.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_hpc.base.atomic_files import write_atomically
from ddp_hpc.base.attempt_end import ATTEMPTS, END, RANK_0, AttemptEnd, rank_0_end, read_end, write_end
from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.run_outcomes import State
from ddp_hpc.base.run_state import RunState, read_state, write_state
from ddp_hpc.queue.failed_nodes import FAILED_NODES
from ddp_hpc.queue.submission_ledger import (
    CANCELLED,
    JOB,
    RESUME,
    Attempt,
    parse_attempt,
    record_attempt,
)
from ddp_hpc.schedulers.scheduler import Scheduler
from ddp_hpc.supervisor.script_copy import script_copy

_OF_ONE_JOB, _OF_ONE_ATTEMPT = (CANCELLED, RESUME), (RANK_0, END)
_CHECKED = ("state", ATTEMPTS, *_OF_ONE_JOB, *_OF_ONE_ATTEMPT, JOB, FAILED_NODES)
Stamp = tuple[int, int] | None


@dataclass(frozen=True)
class SeenState:
    """The content of `state`, and when it was written. Without a valid line, `state` is None."""

    state: State | None = None
    step: int = 0
    reason: str = ""
    stamp: Stamp = None
    is_step_known: bool = True


def array_run_dir(run_dir: Path, index: str, script: str, scheduler: Scheduler) -> Path:
    """Returns the run directory of one task of a job array: `task-INDEX` in the run directory that the script
    sets.

    If the script itself derives DDP_HPC_RUN_DIR from the index, its directory is not changed.
    """
    names = "|".join(scheduler.inside_job.variables.array_indices)
    is_own = re.search(rf"^\s*export\s+DDP_HPC_RUN_DIR=.*\b(?:{names})\b", script, re.MULTILINE)
    return run_dir if is_own else run_dir / f"task-{index}"


class RunFiles:
    """The control files in the run directory `path`, which is created if it does not exist.

    Raises:
        DdpHpcError: the directory cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.script = path / JOB
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DdpHpcError(f"the run directory {path} cannot be created; check DDP_HPC_RUN_DIR") from error

    def check(self) -> None:
        """Checks that only this user can write the files, since they control this job and its successors.

        Raises:
            RequestError: a file belongs to another user, or other users can write to it.
        """
        for path in (self.path / name for name in _CHECKED):
            try:
                status = path.lstat()
            except OSError:
                continue
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise RequestError(
                    f"{path} is not a regular file, belongs to another user, or is writable by other users; "
                    "it must be a file that only you can write to: inspect it, then remove it or run "
                    "chmod go-w on it"
                )

    def state(self) -> SeenState:
        """Returns the state of the run. A damaged file counts as no state."""
        path = self.path / "state"
        with suppress(OSError):
            status = path.stat()
            stamp = (status.st_ino, status.st_mtime_ns)
            with suppress(DdpHpcError):
                if state := read_state(self.path):
                    return SeenState(state.state, state.step, state.reason, stamp, state.is_step_known)
            return SeenState(stamp=stamp)
        return SeenState()

    def write_state(self, state: SeenState) -> None:
        """Writes the state for a program that does not write its own state.

        Raises:
            DdpHpcError: the file cannot be written.
        """
        assert state.state is not None  # a program has ended in some state
        write_state(self.path, RunState(state.state, state.step, state.reason, state.is_step_known))

    def last_attempt(self) -> Attempt | None:
        """Returns the last attempt, with the first step of its job; None if there has been none.

        Raises:
            DdpHpcError: the last line of `attempts` is malformed.
        """
        lines = self._lines(ATTEMPTS)
        if not lines:
            return None
        attempt = parse_attempt(lines[-1])
        if attempt is None:
            raise DdpHpcError(
                f"the last line of {self.path / ATTEMPTS} is {lines[-1][:80]!r}; it must have the format "
                "ATTEMPT JOBID STEP UNIX_S; remove the file"
            )
        starts = [parse_attempt(line) for line in lines]
        first_steps = [start.first_step for start in starts if start and start.job_id == attempt.job_id]
        return replace(attempt, first_step=min(first_steps))

    def keep_script(self, script: Path, without: re.Pattern[bytes], variables: Mapping[str, str]) -> None:
        """Copies the script of this job for other jobs; for `without` and `variables` see `script_copy`.

        Raises:
            DdpHpcError: a file cannot be written.
        """
        with _explained():
            content = script_copy(script.read_bytes(), without, variables)
            write_atomically(self.script, content, "job", is_private=True)
            self.script.chmod(self.script.stat().st_mode | 0o100)

    def begin(self, attempt: Attempt) -> None:
        """Records the first attempt of a job.

        Raises:
            DdpHpcError: a file cannot be written.
        """
        self._remove(_OF_ONE_JOB)
        self.begin_again(attempt)

    def begin_again(self, attempt: Attempt) -> None:
        """Records another attempt of the same job.

        Raises:
            DdpHpcError: a file cannot be written.
        """
        self._remove(_OF_ONE_ATTEMPT)
        record_attempt(self.path, attempt)

    def write_resume(self, command: str, why: str) -> None:
        """Writes the command that resumes the run, and why no job that does is known to be queued.

        Raises:
            DdpHpcError: the file cannot be written.
        """
        content = f"{command}\n# {' '.join(why.split())}\n".encode("utf-8", "surrogateescape")
        write_atomically(self.path / RESUME, content, "job", is_private=True)

    def remove_resume(self) -> None:
        """Removes the command of `write_resume`, because another job is queued."""
        with suppress(OSError):
            (self.path / RESUME).unlink(missing_ok=True)

    def withdraw(self) -> None:
        """Removes the last line of `attempts`: a start that was refused does not count as an attempt."""
        lines = self._lines(ATTEMPTS)
        content = "".join(f"{line}\n" for line in lines[:-1]).encode("utf-8", "surrogateescape")
        write_atomically(self.path / ATTEMPTS, content, "job", is_private=True)

    def is_last(self, attempt: Attempt) -> bool:
        """Returns whether no other job has started with this run directory since `attempt`."""
        return any(line.startswith(attempt.key + " ") for line in self._lines(ATTEMPTS)[-1:])

    def has_begun(self, attempt: Attempt, before: SeenState, now: SeenState) -> bool:
        """Returns whether ranks are known to have begun; `before` is the state before the attempt."""
        if now.stamp != before.stamp or self.end(attempt) is not None:
            return True
        with suppress(LookupError):
            rank_0_end(self.path, attempt.key)
            return True
        return False

    def end(self, attempt: Attempt) -> AttemptEnd | None:
        """Returns how the attempt ended, as its ranks have recorded; None without a record."""
        return read_end(self.path, attempt.key)

    def write_end(self, attempt: Attempt, end: AttemptEnd) -> None:
        """Records how an attempt ended whose ranks have recorded nothing."""
        with suppress(DdpHpcError):  # the disk is full, for example
            write_end(self.path, attempt.key, end)

    def _remove(self, names: tuple[str, ...]) -> None:
        with _explained():
            for name in names:
                (self.path / name).unlink(missing_ok=True)

    def _lines(self, name: str) -> list[str]:
        try:
            return (self.path / name).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        except OSError:
            return []


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DdpHpcError(
            f"{error.filename} cannot be read or removed ({error.strerror}); check its permissions"
        ) from error
