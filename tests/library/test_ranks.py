"""A user's script on several ranks: their common results, and how they end together."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from ddp_hpc.base.run_state import read_state
from tests.conftest import Launch
from tests.training.forked import Forks, Job
from tests.training.runs import run, start, succeeded

SCRIPT = "tests.library.script"


def _run(forks: Forks, cwd: Path, *words: str, ranks: int = 2) -> tuple[list[int], Job]:
    job = forks.start(*words, cwd=cwd, ranks=ranks, program=SCRIPT)
    return job.wait(), job


def _losses(folder: Path) -> list[list[float]]:
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("strategy", "ranks", "batch"), [("ddp", 2, 6), ("ddp", 3, 4), ("fsdp", 2, 6)])
def test_losses_equal_those_of_one_rank_even_if_the_samples_do_not_divide_evenly(
    tmp_path: Path, forks: Forks, strategy: str, ranks: int, batch: int
) -> None:
    losses = []
    for num, size in ((1, 12), (ranks, batch)):
        home = tmp_path / str(num)
        home.mkdir()
        codes, job = _run(forks, home, "", strategy, f"batch={size}", ranks=num)
        assert codes == [0] * num, job.words()
        assert "each sample was seen [2.0] times" in job.words()
        losses.append([loss for _, _, loss in _losses(home)])
    assert len(losses[0]) == 10
    assert losses[1] == pytest.approx(losses[0], abs=1e-12)


def test_an_exception_on_one_rank_ends_all_and_its_traceback_starts_in_the_script(
    tmp_path: Path, forks: Forks
) -> None:
    codes, job = _run(forks, tmp_path, "raise:1", ranks=3)
    assert codes == [1, 1, 1]
    assert job.words().count("Traceback") == 1
    first = r"\[rank 1/3 \S+\] Traceback \(most recent call last\):\n  File .*script\.py"
    assert re.search(first, job.words()), "the traceback starts in the script"
    assert job.words().rstrip().endswith("ValueError: planted in a script")


def test_nonfinite_parameters_are_not_saved(tmp_path: Path, forks: Forks) -> None:
    codes, job = _run(forks, tmp_path, "nan", "saves")
    assert codes == [1, 1]
    [line] = job.errors()
    assert "step 4: the parameter 0.weight is not finite on rank 0; training cannot continue" in line
    assert list((tmp_path / "run").glob("step_*")) == []
    state = read_state(tmp_path / "run")
    assert state is not None
    assert state.state == "failed"


def test_an_invalid_request_is_one_line_and_exit_code_2(tmp_path: Path, forks: Forks) -> None:
    codes, job = _run(forks, tmp_path, "request:0")
    assert codes[0] == 2
    [line] = job.errors()
    assert line.endswith("error: planted; nothing was needed; leave it out")
    assert "Traceback" not in job.words()


def test_a_job_whose_ranks_all_exit_with_0_has_succeeded(tmp_path: Path, forks: Forks) -> None:
    codes, job = _run(forks, tmp_path, "exit")
    assert codes == [0, 0]
    assert job.errors() == []


def test_a_rank_that_exits_with_a_message_ends_all_with_this_message(tmp_path: Path, forks: Forks) -> None:
    codes, job = _run(forks, tmp_path, "words:1")
    assert codes == [1, 1]
    [line] = job.errors()
    assert line.startswith("[rank 1/2 ")
    assert line.endswith("error: planted words")


def test_a_killed_rank_ends_all_and_is_named(tmp_path: Path, forks: Forks) -> None:
    codes, job = _run(forks, tmp_path, "kill:1")
    assert codes == [1, -9]
    [line] = job.errors()
    assert "error: rank 1 on " in line
    assert " is gone" in line


def test_a_signal_without_snapshots_ends_all(tmp_path: Path, forks: Forks) -> None:
    codes, job = _run(forks, tmp_path, "term:1")
    assert 0 not in codes
    [line] = job.errors()
    assert "stopped by SIGTERM" in line


def test_a_signal_with_snapshots_stops_all_after_the_same_step_and_the_next_run_resumes_exactly(
    tmp_path: Path, forks: Forks
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    assert _run(forks, whole, "", "saves", "dropout")[0] == [0, 0]
    codes, job = _run(forks, parts, "term:1", "saves", "dropout")
    assert codes == [75, 0]
    assert (
        "Stopping: rank 1 received SIGTERM. State saved; run the same command again to resume." in job.words()
    )
    assert "after the with" not in job.words()
    state = read_state(parts / "run")
    assert state is not None
    assert state.state == "requeue"
    assert state.step == 4
    codes, job = _run(forks, parts, "", "saves", "dropout")
    assert codes == [0, 0]
    assert f"resuming after step {state.step} " in job.words()
    assert _losses(parts) == _losses(whole)


@pytest.mark.check
def test_a_sharded_model_resumes_from_the_snapshot_of_a_replicated_one(tmp_path: Path, forks: Forks) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    assert _run(forks, whole, "", "saves", "batch=6")[0] == [0, 0]
    for words, codes in ((["term:1", "fsdp"], [75, 0]), (["", "ddp"], [0, 0])):
        ended, job = _run(forks, parts, *words, "saves", "batch=6")
        assert ended == codes, job.words()
    assert [loss for _, _, loss in _losses(parts)] == pytest.approx([loss for _, _, loss in _losses(whole)])


def test_a_model_that_differs_between_ranks_is_refused(tmp_path: Path, forks: Forks) -> None:
    codes, job = _run(forks, tmp_path, "wider:1")
    assert codes == [2, 2]
    [line] = job.errors()
    assert "the model differs between ranks: 0.weight (9, 4" in line


def test_a_rank_that_hangs_in_a_step_is_named(tmp_path: Path, forks: Forks) -> None:
    codes, job = _run(forks, tmp_path, "sleep:1")
    assert 0 not in codes
    assert "rank 1 on " in job.errors()[0]
    assert "in step 3 (script)" in job.errors()[0]


@pytest.mark.check
def test_work_outside_of_the_loops_has_no_time_limit(tmp_path: Path, forks: Forks) -> None:
    codes, job = _run(forks, tmp_path, "rest")
    assert codes == [0, 0], job.words()


def _parts(forks: Forks, cwd: Path, kind: str) -> tuple[list[int], Job]:
    job = forks.start(kind, cwd=cwd, ranks=2, program="tests.library.parts")
    return job.wait(), job


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_micro_batches_have_the_gradients_of_the_whole_batch_and_communicate_once(
    strategy: str, tmp_path: Path, forks: Forks
) -> None:
    codes, job = _parts(forks, tmp_path, strategy)
    assert codes == [0, 0], job.words()
    assert "checked" in job.words()


def test_micro_batches_of_a_static_graph_are_refused(tmp_path: Path, forks: Forks) -> None:
    codes, job = _parts(forks, tmp_path, "static")
    assert 2 in codes, job.words()
    [line] = job.errors()
    assert "micro_batches() does not support wrap(..., static_graph=True)" in line


def test_an_object_whose_state_differs_between_ranks_is_a_warning(tmp_path: Path, forks: Forks) -> None:
    codes, job = _parts(forks, tmp_path, "objects")
    assert codes == [0, 0], job.words()
    [warning] = [line for line in job.words().splitlines() if "warning" in line]
    assert warning.startswith("warning: ddp_hpc.snapshots(own=): its state differs between ranks")


def test_each_sample_is_gathered_once_and_shapes_that_differ_are_refused(
    tmp_path: Path, forks: Forks
) -> None:
    codes, job = _parts(forks, tmp_path, "gather")
    assert codes == [2, 2], job.words()
    [line] = job.errors()
    assert "the shape is (samples, 4) on rank 1, but (samples, 3) on rank 0; only the first axis may" in line


@pytest.mark.check
def test_the_workers_of_each_rank_read_its_share(tmp_path: Path, mpiexec: Path, launch: Launch) -> None:
    program = "import sys; from tests.library import parts; parts.main(sys.argv[1:])"
    argv = [mpiexec, "-n", "2", sys.executable, "-c", program, "workers"]
    ended = launch(argv, cwd=tmp_path, timeout_s=90)
    assert ended.exit_code == 0, ended.stderr
    assert "checked" in ended.stdout


_GLOO_IS_LATE = """
import time
import torch
import torch.distributed as dist
import ddp_hpc

def stay_in_gloo_thread(_):
    end_s = time.monotonic() + 2.0
    while time.monotonic() < end_s:
        pass

with ddp_hpc.distributed() as world:
    model = ddp_hpc.wrap(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    time.sleep(0.3 * world.rank)  # or rank 0's collective is complete before there is a callback
    future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
    if world.rank == 0:
        future.add_done_callback(stay_in_gloo_thread)
    future.wait()
del model, world, future
print("freed", flush=True)
"""


@pytest.mark.check
def test_a_process_ends_successfully_while_gloo_still_frees_a_collective(tmp_path: Path) -> None:
    """Destroying the process group waits for gloo's thread, which needs the GIL."""
    (tmp_path / "late.py").write_text(_GLOO_IS_LATE)
    done = succeeded(run([*start(2), "late.py"], tmp_path))
    assert done.stdout.count("freed") == 2
