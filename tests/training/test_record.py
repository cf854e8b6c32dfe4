"""What the ranks of an attempt write about it to the run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.base.attempt_end import AttemptEnd, read_end
from ddp_hpc.base.run_outcomes import Cause, State
from ddp_hpc.base.run_state import RunState, read_state, write_state
from ddp_hpc.training.run.record import RunRecord


@pytest.mark.parametrize(("attempt", "state"), [("1 17", State.RUNNING), ("2 17", State.REQUEUE)])
def test_only_a_rank_of_the_newest_attempt_changes_the_state_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: str, state: State
) -> None:
    """A rank on a node that was cut off notices only after a minute that it has lost the others."""
    monkeypatch.setenv("DDP_HPC_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("DDP_HPC_THIS_ATTEMPT", attempt)
    (tmp_path / "attempts").write_text("1 17 0 1000\n2 17 40 2000\n")
    write_state(tmp_path, RunState(State.RUNNING, 60, "saved a snapshot"))
    record = RunRecord(tmp_path, is_rank_0=False, say=print)
    record.opened()
    record.resumed(40, 0.1)
    end = AttemptEnd(cause=Cause.LOST_RANK, exit_code=1, reason="lost contact with rank 0", rank=0)
    record.failed(end)
    after = read_state(tmp_path)
    assert after is not None
    assert (after.state, after.step) == (state, 60)
    assert read_end(tmp_path, attempt) == (end if state is State.REQUEUE else None)
