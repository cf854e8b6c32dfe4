"""The state of a run whose snapshot becomes complete while a rank is lost."""

from pathlib import Path

import pytest

from ddp_hpc.base.run_outcomes import State
from ddp_hpc.base.run_state import RunState, read_state, write_state
from ddp_hpc.training.run.record import RunRecord, Spent


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    """Writes the state of a run that has begun at step 0."""
    record = RunRecord(tmp_path, is_rank_0=True, say=print)
    write_state(tmp_path, RunState(State.RUNNING, 0, "since today"))
    return record


def test_the_first_snapshot_counts_although_a_rank_was_lost_meanwhile(
    record: RunRecord, tmp_path: Path
) -> None:
    """The run can be resumed from it."""
    record.saved(30, Spent(0.0, 0.0, 0.0), is_rank_lost=True)
    assert read_state(tmp_path) == RunState(State.RUNNING, 30, "saved a snapshot")


def test_the_failure_of_a_rank_remains_the_state(record: RunRecord, tmp_path: Path) -> None:
    write_state(tmp_path, RunState(State.FAILED, 0, "rank 1: ValueError"))
    record.saved(30, Spent(0.0, 0.0, 0.0), is_rank_lost=True)
    assert read_state(tmp_path) == RunState(State.FAILED, 30, "rank 1: ValueError")


def test_a_run_that_another_job_has_taken_over_is_left_alone(record: RunRecord, tmp_path: Path) -> None:
    record.is_taken_over = lambda: True
    record.saved(30, Spent(0.0, 0.0, 0.0), is_rank_lost=True)
    assert read_state(tmp_path) == RunState(State.RUNNING, 0, "since today")
