"""The state of a run whose program does not write `state`: a program that does not use ddp-hpc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from glob import iglob
from itertools import islice
from pathlib import Path

from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.errors import EXIT_REQUEUE
from ddp_hpc.base.run_outcomes import State
from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.supervisor.run_files import SeenState

# Limits the time for listing a directory of checkpoints, which can contain very many files.
_MOST_FILES = 100_000


class Progress:
    """Checkpoints of a program: `file`, which the program touches after each checkpoint, and files that match
    `patterns`.

    Checkpoints that exist when the object is created belong to earlier jobs.
    """

    def __init__(self, file: Path, patterns: tuple[str, ...] = ()) -> None:
        self.file = file
        self._patterns = patterns
        self.before_ns = self.last_change_ns()
        """The time of the last change before the object was created."""

    def saved_s(self) -> float | None:
        """Returns when the last checkpoint since this object was created was saved, in seconds since the Unix
        epoch; None if none was.
        """
        changed_ns = self.last_change_ns()
        return changed_ns / 1e9 if changed_ns > self.before_ns else None

    def last_change_ns(self) -> int:
        """Returns the time of the last change of a checkpoint, in nanoseconds since the Unix epoch."""
        return max((_modified_ns(path) for path in islice(self._paths(), _MOST_FILES)), default=0)

    def _paths(self) -> Iterator[str]:
        yield str(self.file)
        for pattern in self._patterns:
            for match in iglob(pattern):  # noqa: PTH207 - patterns can be absolute
                yield match
                for directory, _, names in os.walk(match):
                    yield directory
                    yield from (os.path.join(directory, name) for name in names)  # noqa: PTH118 - many files

    def step(self) -> int:
        """Returns the step that the program has written into `file`; 0 if there is none."""
        try:
            words = self.file.read_text(encoding="ascii", errors="replace")[:40].split()
        except OSError:
            return 0
        return int(words[0]) if words and words[0].isdecimal() and len(words[0]) <= 15 else 0


def state_of_program(
    end: AttemptEnd, attempt: Attempt, recorded_step: int, *, has_progressed: bool, at_deadline: bool
) -> SeenState:
    """Returns the state of the run after its program has ended. `recorded_step` is that of `Progress`, and
    `has_progressed` is whether the program has saved a checkpoint.

    Exit code 75, or the signal that ended the program before the deadline (`at_deadline`), means that the
    program has saved a checkpoint and must be run again. A run without progress is not resumed. The step is
    that of the last checkpoint, and unknown if the program does not record a greater step than before. A
    completed program has run beyond its last checkpoint, so that its step is 0.
    """
    code, step = end.exit_code, attempt.first_step
    if has_progressed:
        step = recorded_step if recorded_step > attempt.first_step else 0
    is_known = not has_progressed or step > 0
    if at_deadline and has_progressed:
        return SeenState(State.REQUEUE, step, "the walltime is about to end", is_step_known=is_known)
    if code == EXIT_REQUEUE and has_progressed:
        return SeenState(State.REQUEUE, step, f"the program exited with code {code}", is_step_known=is_known)
    if code == EXIT_REQUEUE or at_deadline:
        return SeenState(
            State.FAILED,
            step,
            f"the program exited with code {code}, but no checkpoint was recorded; after each checkpoint, "
            "touch the file $DDP_HPC_PROGRESS_FILE, or name the checkpoints with --progress",
        )
    if code:
        return SeenState(State.FAILED, step, end.reason, is_step_known=is_known)
    return SeenState(State.DONE)


def _modified_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116 - many files
    except OSError:
        return 0
