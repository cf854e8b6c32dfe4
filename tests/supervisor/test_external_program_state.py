"""The state of a run whose program does not write it: from its exit code and its checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.run_outcomes import Cause, State
from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.supervisor.external_program_state import Progress, state_of_program

ATTEMPT = Attempt(number=2, job_id="17", first_step=100, at_s=1700000000)
NO_CHECKPOINT = "exited with code {}, but no checkpoint was recorded; after each checkpoint, touch the file"


@pytest.mark.parametrize(
    ("code", "at_deadline", "written", "state", "step", "reason"),
    [
        # `written` is what the program writes to its progress file; None: it saves no checkpoint.
        (75, False, "", State.REQUEUE, None, "the program exited with code 75"),
        (75, False, "400", State.REQUEUE, 400, "the program exited with code 75"),
        (75, False, "100", State.REQUEUE, None, "the program exited with code 75"),  # no greater step
        (75, False, None, State.FAILED, 100, NO_CHECKPOINT.format(75)),
        (0, False, "400", State.DONE, 0, ""),  # it has gone on after its last checkpoint
        (0, True, "", State.REQUEUE, None, "the walltime is about to end"),
        (143, True, "400", State.REQUEUE, 400, "the walltime is about to end"),
        (143, True, None, State.FAILED, 100, NO_CHECKPOINT.format(143)),
        (3, False, "", State.FAILED, None, "exit code 3"),  # never resumed, although it has progressed
        (3, False, "400", State.FAILED, 400, "exit code 3"),
    ],
)
def test_the_state_of_a_run(
    tmp_path: Path,
    code: int,
    at_deadline: bool,
    written: str | None,
    state: State,
    step: int | None,
    reason: str,
) -> None:
    progress = Progress(tmp_path / "progress")
    if written is not None:
        progress.file.write_text(written)
    end = AttemptEnd(cause=Cause.EXITED, exit_code=code, reason=f"exit code {code}")
    found = state_of_program(
        end,
        ATTEMPT,
        progress.step(),
        has_progressed=progress.saved_s() is not None,
        at_deadline=at_deadline,
    )
    assert (found.state, found.step if found.is_step_known else None) == (state, step)
    assert reason in found.reason


def test_files_that_match_a_pattern_are_progress_unless_they_are_old(tmp_path: Path) -> None:
    old = tmp_path / "checkpoints" / "epoch=2.ckpt"
    old.parent.mkdir()
    old.touch()
    progress = Progress(tmp_path / "progress", (str(tmp_path / "check*"),))
    assert progress.saved_s() is None
    later_ns = old.stat().st_mtime_ns + 1_000_000
    new = old.with_name("epoch=3.ckpt")
    new.touch()
    os.utime(new, ns=(later_ns, later_ns))
    # The directory has changed, too.
    assert later_ns / 1e9 <= (progress.saved_s() or 0.0) < later_ns / 1e9 + 60
