"""--compile combined with options that affect gradients: they always equal those of plain torch."""

import json

import pytest
import torch
from torch import nn

from ddp_hpc.training.tasks.task import Task, default_loss

from .one_process import Steps
from .option_rows import BLOCKS, STEPS, Graphs

COMPILED = {"compile": "default"}
# One row of each kind.
SOME = [
    {**COMPILED, "bucket_mib": 1.0, "static_graph": True},
    {**COMPILED, "strategy": "zero", "clip_norm": 0.01, "accumulate": 2, "find_unused_parameters": True},
    {"compile": "reduce-overhead", "accumulate": 2},
    {**COMPILED, "strategy": "fsdp", "activation_checkpointing": True},
]
# Half-precision types have 8 or 11 bits of precision.
EXACT, HALF = 1e-9, 5e-2
NUM_PARAMETERS = 4 * BLOCKS


def measured(forks, folder, rows, backend="graphs", timeout_s=100.0):
    """The results of each rank for each row."""
    (folder / "rows.json").write_text(json.dumps(rows))
    words = ["rows.json", "found.json", backend]
    job = forks.start(*words, cwd=folder, ranks=2, program="tests.training.option_rows")
    assert job.wait(timeout_s) == [0, 0], job.words()
    found = json.loads((folder / "found.json").read_text())
    assert [options for options, _ in found] == rows
    return found


def assert_gradients_of_plain_torch(options, ranks):
    half = "compress_gradients" in options or "amp" in options
    for rank in ranks:
        assert rank["far"] < (HALF if half else EXACT), options
        assert (rank["steps"], rank["gradients"]) == (STEPS, STEPS * NUM_PARAMETERS), options
    first, second = (rank["sums"] for rank in ranks)
    assert first == second, options


@pytest.fixture(scope="module")
def some(forks, tmp_path_factory):
    return measured(forks, tmp_path_factory.mktemp("rows"), SOME)


def test_compiled_gradients_equal_plain_torch_from_the_first_step(some):
    for options, ranks in some:
        assert_gradients_of_plain_torch(options, ranks)


def test_compiled_code_sends_buckets_during_the_backward_pass(some):
    _, ranks = some[0]
    for rank in ranks:
        assert rank["graphs"] > 2
        each = len(rank["events"]) // STEPS
        for step in range(STEPS):
            events = rank["events"][step * each : (step + 1) * each]
            assert events.index("all-reduce") < len(events) - 1 - events[::-1].index("backward"), events


def test_a_smaller_last_batch_does_not_change_the_code_for_full_batches():
    # By default, torch marks the size as dynamic at the smaller batch, and then uses that code for all sizes.
    sizes = [8, 8, 5, 8, 8, 5]
    graphs, used = Graphs(), []

    def batches():
        for size in sizes:
            yield torch.rand(size, 4), torch.rand(size, 4)

    torch._dynamo.reset()
    with graphs.used():
        steps = Steps(Task(model=nn.Linear(4, 4), loss=default_loss), batches(), compile="default")
        for size in sizes:
            before = graphs.num
            steps.step(size)
            used.append((graphs.num - before, graphs.last))
    assert used == [(1, 0), (0, 0), (1, 1), (0, 0), (0, 0), (0, 1)]


# With torch's own compiler, inductor, which takes some seconds per row.
COMPILED_INDEED = [
    COMPILED,
    {**COMPILED, "bucket_mib": 1.0, "static_graph": True},
    {"compile": "reduce-overhead", "accumulate": 2, "clip_norm": 0.01},
    {**COMPILED, "activation_checkpointing": True, "find_unused_parameters": True},
    {**COMPILED, "amp": "bf16"},
    {**COMPILED, "strategy": "zero", "optimizer": "adamw", "weight_decay": 0.1},
    {**COMPILED, "strategy": "fsdp"},
    {**COMPILED, "strategy": "fsdp", "activation_checkpointing": True, "accumulate": 2},
]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_gradients_with_inductor_equal_plain_torch(forks, tmp_path):
    for options, ranks in measured(forks, tmp_path, COMPILED_INDEED, "inductor", timeout_s=850):
        assert_gradients_of_plain_torch(options, ranks)
