"""A run that is killed and resumed equals an uninterrupted run: real ranks, real SIGKILL."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_hpc.base.attempt_end import read_end
from ddp_hpc.base.run_outcomes import Cause
from tests.conftest import Launch

from .forked import Forks, Job
from .runs import MpiJob, succeeded, train
from .tiny import (
    DATA,
    EPOCHS,
    EVERY_STEP,
    MODEL,
    STEPS,
    assert_equal,
    make_home,
    snapshot_files,
    state_of,
    trained,
)


@pytest.fixture
def used(whole: Path, home: Path) -> Path:
    """A copy of the directory of the uninterrupted run."""
    shutil.copytree(whole / "run", home / "run")
    shutil.copy(whole / "m.jsonl", home)
    return home


def _kill_often(
    home: Path, start_one: Callable[[], Job | MpiJob], chance: random.Random, kills: int, start_s: float
) -> None:
    """Sends SIGKILL to all ranks at random moments: during startup, steps and saves."""
    for _ in range(kills):
        more_steps = chance.randint(0, 3)
        target = state_of(home).step + more_steps
        job = start_one()
        while job.running() and state_of(home).step < target:
            time.sleep(0.001)
        # After up to two steps with their saves, or during startup.
        time.sleep(chance.uniform(0, 0.05 if more_steps else start_s))
        assert job.running(), f"the run ended before the kill: more steps are needed\n{job.words()}"
        job.kill()
        job.wait()


def test_a_run_killed_at_random_moments_ends_like_an_uninterrupted_one(
    home: Path, whole: Path, forks: Forks
) -> None:
    options = [*DATA, *EVERY_STEP, "--epochs", str(EPOCHS)]
    _kill_often(home, lambda: forks.start(*options, cwd=home, ranks=2), random.Random(1), 3, 0.3)
    forks.run(*options, cwd=home, ranks=2)
    assert_equal(home, whole, STEPS)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_under_mpiexec_a_run_killed_40_times_ends_like_an_uninterrupted_one(
    home: Path, tiny_data: Path, launch: Launch
) -> None:
    options = [*DATA, *EVERY_STEP, "--epochs", "60"]
    whole = make_home(home / "whole", tiny_data)
    for place in (whole, home):
        if place == home:
            _kill_often(home, lambda: MpiJob(launch, options, home), random.Random(40), 40, 3.0)
        succeeded(train(*options, cwd=place, ranks=2, timeout_s=300))
    assert_equal(home, whole, 4 * 60)


@pytest.mark.check
def test_three_ranks_resume_bit_for_bit(home: Path, tiny_data: Path, forks: Forks) -> None:
    """With three ranks, a sum depends on the order of its terms: DDP rebuilds its buckets after step 1.

    This model is larger than the first bucket, which has 1 MiB.
    """
    options = [*DATA, "--model", "transformer", *EVERY_STEP, "--epochs", "2"]
    other = make_home(home / "other", tiny_data)
    forks.run(*options, cwd=other, ranks=3)
    _kill_often(home, lambda: forks.start(*options, cwd=home, ranks=3), random.Random(3), 1, 0.3)
    forks.run(*options, cwd=home, ranks=3)
    assert_equal(home, other, 6)


def test_another_number_of_ranks_has_the_same_samples_and_losses(
    home: Path, tiny_data: Path, forks: Forks
) -> None:
    """The global batch of 8 and the learning rate stay the same. In float32, Adam would magnify rounding."""
    options = [*MODEL, "--data", "float64.h5", "--dropout", "0"]
    options += ["--epochs", "2", "--metrics", "m.jsonl"]
    other = make_home(home / "other", tiny_data)
    forks.run(*options, "--batch-size", "4", cwd=other, ranks=2)
    words = ""
    for ranks, batch_size, steps in ((2, "4", "4"), (4, "2", "9"), (1, "8", "99")):
        limits = ["--batch-size", batch_size, "--max-steps", steps, "--snapshot-dir", "run"]
        words += forks.run(*options, *limits, cwd=home, ranks=ranks).words()
    assert "note: the number of ranks changed from 2 to 4" in words
    assert "note: the number of ranks changed from 4 to 1" in words
    whole, parts = trained(other), trained(home)
    assert [line.pop("loss") for line in parts] == pytest.approx(
        [line.pop("loss") for line in whole], abs=1e-9
    )
    assert parts == whole


def test_with_another_global_batch_every_sample_of_the_epoch_is_used_once(home: Path, forks: Forks) -> None:
    options = [*MODEL, "--data", "train.h5", "--epochs", "2", "--metrics", "m.jsonl", "--snapshot-dir", "run"]
    forks.run(*options, "--batch-size", "8", "--max-steps", "2", cwd=home, ranks=2)
    words = forks.run(*options, "--batch-size", "3", cwd=home, ranks=2).words()
    assert "note: the global batch changed from 16 to 6 samples" in words
    counts = [(line["epoch"], line["samples"]) for line in trained(home)]
    assert counts == [(1, 16)] * 2 + [(1, 6)] * 3 + [(1, 1)] + [(2, 6)] * 8 + [(2, 3)]


def test_lines_of_repeated_steps_and_incomplete_lines_are_removed(
    used: Path, whole: Path, forks: Forks
) -> None:
    for step in (STEPS, STEPS - 1):
        shutil.rmtree(used / "run" / f"step_{step:08d}")
    with (used / "m.jsonl").open("a") as file:
        file.write('{"step": 21, "epo')
    words = forks.run(*DATA, *EVERY_STEP, "--epochs", str(EPOCHS), cwd=used, ranks=2).words()
    assert f"resuming after step {STEPS - 2} " in words
    assert_equal(used, whole, STEPS)


@pytest.mark.check
def test_a_finished_run_continues_only_with_more_epochs(used: Path, whole: Path, forks: Forks) -> None:
    (used / "s.json").write_text("{}")
    options = ["--epochs", str(EPOCHS), "--summary", "s.json"]
    words = forks.run(*DATA, *EVERY_STEP, *options, cwd=used, ranks=2).words()
    assert f"note: all {STEPS} steps of this run are already done; raise --epochs to continue it" in words
    assert f"done: {STEPS} steps (0 in this attempt)" in words
    assert (used / "s.json").read_text() == "{}"
    assert_equal(used, whole, STEPS)
    state = state_of(used)
    assert (state.state, state.step) == ("done", STEPS)
    forks.run(*DATA, *EVERY_STEP, "--epochs", str(EPOCHS + 1), cwd=used, ranks=2)
    assert trained(used)[:STEPS] == trained(whole)
    assert [line["epoch"] for line in trained(used)[STEPS:]] == [EPOCHS + 1] * 4
    assert state_of(used).step == STEPS + 4


@pytest.mark.check
def test_changed_options_that_keep_the_order_are_accepted_with_a_note(used: Path, forks: Forks) -> None:
    changed = ["--data", "./train.h5", "--lr", "0.5", "--clip-norm", "3", "--epochs", str(EPOCHS + 1)]
    words = forks.run(*DATA, *EVERY_STEP, *changed, "--max-steps", str(STEPS + 1), cwd=used, ranks=2).words()
    assert "note: changed options: lr 0.5 (was 0.001), clip_norm 3.0 (was None)\n" in words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "linear"], "is from a different model: "),
        (["--seed", "1"], "was made with seed=0, not 1"),
        pytest.param(["--no-shuffle"], "was made with shuffle=True, not False", marks=pytest.mark.check),
        (["--data", "fewer.h5"], "was made with num_samples=51, not 50"),
        pytest.param(["--data", "wider.h5"], "is from a different model: ", marks=pytest.mark.check),
        pytest.param(["--data", "float64.h5"], "float32 in the snapshot, ", marks=pytest.mark.check),
    ],
)
def test_a_snapshot_of_another_run_is_rejected_in_one_line_and_kept(
    used: Path, forks: Forks, options: list[str], words: str
) -> None:
    before = snapshot_files(used)
    job = forks.start(*DATA, *EVERY_STEP, "--epochs", "9", *options, cwd=used, ranks=2)
    assert job.wait() == [2, 2]
    [line] = job.errors()
    assert words in line
    assert "another --snapshot-dir" in line
    assert "Traceback" not in job.words()
    assert snapshot_files(used) == before
    assert len(trained(used)) == STEPS
    state = state_of(used)
    assert (state.state, state.step) == ("done", STEPS), "nothing was started, so nothing else is printed"


def test_a_snapshot_under_the_name_of_another_step_is_skipped_with_a_warning(
    used: Path, whole: Path, forks: Forks
) -> None:
    (used / "run" / f"step_{STEPS:08d}").rename(used / "run" / "step_00000099")
    words = forks.run(*DATA, *EVERY_STEP, "--epochs", str(EPOCHS), cwd=used, ranks=2).words()
    assert f"step_00000099 contains the snapshot of step {STEPS}, so it was renamed or copied" in words
    assert f"resuming after step {STEPS - 1} " in words
    assert_equal(used, whole, STEPS)


def test_a_directory_in_use_is_rejected_without_affecting_the_running_job(home: Path, forks: Forks) -> None:
    endless = [*DATA, "--epochs", "100000", "--snapshot-dir", "run"]
    first = forks.start(*endless, cwd=home, ranks=1)
    while not (home / "run" / "state").exists():
        assert first.running(), first.words()
        time.sleep(0.01)
    run = home / "run"
    before = {**snapshot_files(home), "state": (run / "state").read_bytes()}
    env = {"DDP_HPC_RUN_DIR": str(run), "DDP_HPC_THIS_ATTEMPT": "2 7"}
    second = forks.start(*endless, cwd=home, ranks=2, env=env)
    assert second.wait() == [2, 2]
    [line] = second.errors()
    assert f"another run (PID {first.pids[0]} on " in line
    end = read_end(run, "2 7")
    assert end is not None
    assert end.cause is Cause.REFUSED, "the supervisor needs this"
    after = {**snapshot_files(home), "state": (run / "state").read_bytes()}
    assert {name: after[name] for name in before} == before
    assert first.running()
    first.kill()
