"""Reports of a slow rank, and outputs of metrics other than the metrics file."""

import errno
import json

import pytest

from ddp_hpc.training.health.slow_rank import SlowRankDetector
from ddp_hpc.training.telemetry.metric_sinks import TensorBoard
from ddp_hpc.training.telemetry.metrics_file import StepRecord

from .runs import records

SLOW = """
import os
import time

from torch import nn

from ddp_hpc.training.tasks.task import Task


def net():
    rank, slow = os.environ.get("RANK", "0"), os.environ.get("SLOW_RANK")

    def forward(model, src, tgt):
        if rank == slow:
            time.sleep(0.05)
        return model(src)

    def loss(output, tgt):
        return (output - tgt).square().mean()

    return Task(model=nn.Linear(20, 1), loss=loss, forward=forward)


seen = []


def hook(record):
    seen.append(record)
    with open("hooked", "a") as file:
        file.write(f"{record['step']} ")
    if record["step"] == 3 and os.environ.get("BAD_HOOK"):
        raise ValueError("no route")
"""
WORDS = ["--src-shape", "20", "--tgt-shape", "1", "--num-samples", "96", "--batch-size", "4", "--epochs", "1"]


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(SLOW)
    return tmp_path


def test_a_slow_rank_is_reported_once_with_its_node_and_times(mine, forks):
    words = [*WORDS, "--model", "mine:net", "--log-every", "2"]
    job = forks.run(*words, cwd=mine, ranks=3, env={"SLOW_RANK": "2"})
    (line,) = (line for line in job.words().splitlines() if "is slow" in line)
    assert line.startswith("note: rank 2 on ")
    assert 0.05 <= float(line.split("passes take ")[1].split(" s")[0]) < 0.5


def test_ranks_of_equal_speed_are_not_reported():
    skew = SlowRankDetector(1.5, ["n1", "n1", "n2"])
    assert all(skew.check([0.010, 0.012, 0.014], 0.1) == "" for _ in range(10))


def test_three_consecutive_slow_reports_are_reported_once():
    skew = SlowRankDetector(1.5, ["n1", "n1", "n2"])
    slow, fine = [0.01, 0.01, 0.09], [0.01, 0.01, 0.01]
    told = [skew.check(own_s, 0.1) for own_s in (slow, slow, fine, slow, slow, slow, slow)]
    assert [bool(text) for text in told] == [False] * 5 + [True, False]
    assert "rank 2 on n2 is slow" in told[5]


def test_a_delay_that_does_not_affect_the_step_is_not_reported():
    skew = SlowRankDetector(1.5, ["n1", "n2"])
    assert all(skew.check([0.0001, 0.0009], 1.0) == "" for _ in range(5))


def test_of_two_ranks_the_slower_is_reported():
    skew = SlowRankDetector(1.5, ["n1", "n2"])
    assert "rank 0 on n1" in [skew.check([0.09, 0.01], 0.1) for _ in range(3)][-1]


def test_tensorboard_has_each_step_and_continues_after_a_restart(mine, forks):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = [
        *WORDS,
        "--model",
        "mine:net",
        "--tensorboard",
        "tb",
        "--metrics",
        "m.jsonl",
        "--snapshot-dir",
        "run",
    ]
    forks.run(*words, "--max-steps", "6", cwd=mine, ranks=2)
    forks.run(*words, cwd=mine, ranks=2)
    events = EventAccumulator(str(mine / "tb"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    expected = [(record["step"], record["loss"]) for record in records(mine / "m.jsonl")]
    assert [step for step, _ in found] == [step for step, _ in expected] == list(range(1, 13))
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-6)


def test_a_hook_is_called_with_each_step(mine, forks):
    forks.run(*WORDS, "--model", "mine:net", "--metrics-hook", "mine:hook", cwd=mine, ranks=2)
    assert (mine / "hooked").read_text().split() == [str(step) for step in range(1, 13)]


def test_a_hook_that_raises_is_only_a_warning(mine, forks):
    words = [*WORDS, "--model", "mine:net", "--metrics-hook", "mine:hook"]
    job = forks.run(*words, cwd=mine, ranks=2, env={"BAD_HOOK": "1"})
    assert job.words().count("warning: --metrics-hook mine:hook raised ValueError: no route") == 1
    assert (mine / "hooked").read_text().split() == ["1", "2", "3"]
    assert "done: 12 steps" in job.words()


def test_a_missing_hook_is_an_error_before_the_first_step(mine, forks):
    job = forks.start(*WORDS, "--metrics-hook", "mine:hok", "--model", "mine:net", cwd=mine, ranks=2)
    assert job.wait() == [2, 2]
    (line,) = job.errors()
    assert "--metrics-hook mine:hok: module 'mine' has no attribute 'hok' (did you mean \"hook\"?)" in line


@pytest.mark.parametrize("before", ["", "requeue 12 the walltime\n"])
def test_a_refused_start_does_not_change_the_state_of_the_run(mine, forks, before):
    run = mine / "run"
    run.mkdir()
    if before:
        (run / "state").write_text(before)
    env = {"DDP_HPC_RUN_DIR": str(run), "DDP_HPC_THIS_ATTEMPT": "2 of job 7"}
    words = [*WORDS, "--metrics-hook", "mine:hok", "--model", "mine:net"]
    assert forks.start(*words, cwd=mine, ranks=2, env=env).wait() == [2, 2]
    assert ((run / "state").read_text() if before else (run / "state").exists()) == (before or False)
    assert (run / "refused").read_text() == "2 of job 7\n"


def test_a_missing_hook_does_not_truncate_the_metrics_file(mine, forks):
    (mine / "m.jsonl").write_text("of another run\n")
    words = [*WORDS, "--model", "mine:net", "--metrics", "m.jsonl", "--metrics-hook", "mine:hok"]
    assert forks.start(*words, cwd=mine, ranks=1).wait() == [2]
    assert (mine / "m.jsonl").read_text() == "of another run\n"


def test_a_full_disk_for_tensorboard_is_only_a_warning(tmp_path, monkeypatch, capsys):
    board = TensorBoard(tmp_path, 0)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(board._writer, "add_scalar", full)
    record = StepRecord(step=1, epoch=1, loss=1.0, lr=0.1, samples=8, data_s=0.1, step_s=0.2)
    board.write([record])
    board.write([record])
    board.close()
    assert capsys.readouterr().err.count("stopped writing (No space left on device)") == 1


def test_the_summary_contains_flops_and_memory(mine, forks):
    forks.run(*WORDS, "--model", "mine:net", "--summary", "s.json", cwd=mine, ranks=1)
    summary = json.loads((mine / "s.json").read_text())
    # Two operations per weight in the forward pass and two for its gradient; none for that of the input.
    assert summary["flops_per_s"] == pytest.approx(80 * summary["samples_per_s"])
    assert summary["tokens_per_s"] is None, "a scalar target is not a sequence"
    assert summary["share_of_peak"] is None, "the peak of a CPU is unknown"
    # Parameters, gradients and two states of Adam, each 21 numbers, and two counts of steps.
    assert summary["memory"]["state_bytes"] == 4 * (4 * 21 + 2)
    assert summary["memory"]["peak_bytes"] > 2**20
