"""`--trace-dir`: one Chrome trace and one table per rank, of the requested steps."""

import gzip
import json

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.trace.summarize_run import read_capture
from ddp_hpc.training.telemetry.config import TelemetryConfig

from .runs import LINEAR

WORDS = [*LINEAR, "--num-samples", "96", "--batch-size", "4", "--epochs", "1"]


def _events(folder, rank, ranks):
    with gzip.open(folder / f"rank{rank:05d}-of-{ranks:05d}.json.gz") as file:
        return json.load(file)["traceEvents"]


def test_each_rank_records_the_window_of_the_lesson_with_its_regions(tmp_path, forks):
    forks.run(*WORDS, "--trace-dir", "traces", cwd=tmp_path, ranks=2)
    for rank in (0, 1):
        names = [event["name"] for event in _events(tmp_path / "traces", rank, 2) if event.get("ph") == "X"]
        for region in ("data", "forward", "backward", "optimizer"):
            assert names.count(region) == 2, "two active steps"
        assert [name for name in names if name.startswith("ProfilerStep")] == [
            "ProfilerStep#2",
            "ProfilerStep#3",
        ]
        table = (tmp_path / "traces" / f"rank{rank:05d}-of-00002.txt").read_text()
        assert "Self CPU" in table
        assert "forward" in table
    capture = read_capture(tmp_path / "traces")
    assert ([trace.rank for trace in capture.ranks], capture.missing, capture.notes) == ([0, 1], (), ())
    assert [step.number for step in capture.ranks[0].steps] == [2, 3]
    times = capture.mean
    assert min(times.forward_s, times.backward_s, times.optimizer_s, times.comm_exposed_s) > 0
    assert {row.kind for row in capture.collectives} == {"all_reduce"}


def test_chosen_ranks_and_steps(tmp_path, forks):
    words = [*WORDS, "--trace-dir", "traces", "--trace-ranks", "1", "--trace-window", "0,1,3,2"]
    forks.run(*words, cwd=tmp_path, ranks=2)
    found = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert found == [f"rank00001-of-00002{end}" for end in ("-2.json.gz", "-2.txt", ".json.gz", ".txt")]
    names = [event["name"] for event in _events(tmp_path / "traces", 1, 2)]
    assert names.count("forward") == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trace_window": (1, 1, 2)}, "expected four numbers"),
        ({"trace_window": (1, 1, 0, 1)}, "expected four numbers"),
    ],
)
def test_an_invalid_window_is_rejected(options, words):
    with pytest.raises(RequestError, match=words):
        TelemetryConfig(**options)


def test_ranks_that_do_not_exist_are_a_warning(tmp_path, forks):
    job = forks.run(*WORDS, "--trace-dir", "traces", "--trace-ranks", "7,0,5", cwd=tmp_path, ranks=2)
    assert [line for line in job.words().splitlines() if line.startswith("warning")] == [
        "warning: traces: no trace of ranks 5, 7: the ranks are 0 to 1"
    ]
    assert len(list((tmp_path / "traces").glob("*"))) == 2


def test_a_snapshot_has_a_separate_region(tmp_path, forks):
    words = [*WORDS, "--trace-dir", "traces", "--trace-window", "1,1,4,1"]
    forks.run(*words, "--snapshot-dir", "snapshots", "--snapshot-every-steps", "3", cwd=tmp_path, ranks=1)
    assert "snapshot" in [event["name"] for event in _events(tmp_path / "traces", 0, 1)]


def test_stacks_and_flops_are_recorded_if_requested(tmp_path, forks):
    words = [*WORDS, "--trace-dir", "traces", "--trace-stacks", "--trace-flops"]
    forks.run(*words, cwd=tmp_path, ranks=1)
    assert any(event.get("cat") == "python_function" for event in _events(tmp_path / "traces", 0, 1))
    assert "FLOPs" in (tmp_path / "traces" / "rank00000-of-00001.txt").read_text()


_LATE_END = """
import time
import torch
import torch.distributed as dist
import ddp_hpc

def stay_in_gloo_thread(_):
    end_s = time.monotonic() + 0.5
    while time.monotonic() < end_s:
        pass

with ddp_hpc.distributed() as world, ddp_hpc.tracing("traces", wait=0, warmup=1, active=1) as trace:
    for _ in range(2):
        world.barrier()
        time.sleep(0.3 * world.rank)  # or rank 0's collective is complete before there is a callback
        future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
        if world.rank == 0:
            future.add_done_callback(stay_in_gloo_thread)
        future.wait()
        trace.step()
"""


def test_the_profiler_stops_after_gloo_has_ended_its_events(tmp_path, forks):
    """gloo ends an event after completing the future that DDP waits for, and would write to freed memory."""
    (tmp_path / "late.py").write_text(_LATE_END)
    job = forks.start("late.py", cwd=tmp_path, ranks=2, program="tests.examples.script")
    assert job.wait() == [0, 0], job.words()
    (event,) = (
        event
        for event in _events(tmp_path / "traces", 0, 2)
        if event.get("name") == "gloo:all_reduce" and "dur" in event
    )
    assert event["dur"] >= 0.5e6
