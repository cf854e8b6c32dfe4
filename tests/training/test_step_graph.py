"""The logic of `--cuda-graph`, with a stand-in that replays a step by calling it again.

A replay calls the function of the captured step with the inputs of that step, as a CUDA graph repeats the
same work on the same memory: whatever was read on the host at the capture keeps its old value. The tests with
real graphs are in tests/gpu/test_whole_steps.py; they have not been run.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.training.optimization import step_graph
from ddp_hpc.training.optimization.step_graph import CapturedStep, StepGraph
from ddp_hpc.training.process_group import errors_of_torch
from ddp_hpc.training.tasks.decoder import decoder
from ddp_hpc.training.tasks.task import SampleSpec

from .one_process import Steps


@pytest.fixture
def captures(monkeypatch):
    """Replaces captures and replays; lists the captures by the size of the first batch, and the resets."""
    made = []

    def capture(self, inputs, compute):
        made.append(len(inputs[0][0]))
        loss_sum = torch.zeros(())
        graph = SimpleNamespace(
            replay=lambda: loss_sum.copy_(compute(inputs)), reset=lambda: made.append("reset")
        )
        return CapturedStep(graph, inputs, loss_sum)

    monkeypatch.setattr(StepGraph, "_capture", capture)
    return made


def total(batches):
    return torch.stack([(src + tgt).sum() for src, tgt in batches]).sum()


def batch(value, size=2):
    return torch.full((size,), float(value)), torch.ones(size)


def test_a_step_is_captured_after_the_eager_ones_and_then_replayed_with_its_own_batch(captures):
    graph, given = StepGraph(2), []
    for value in range(6):
        buffers = [batch(value), batch(10 * value)]
        given.append(total(buffers).item())
        sums = graph.run(4, iter(buffers), total)
        for src, _ in buffers:
            src.fill_(-1.0)  # the loader reuses its memory
        assert sums.item() == given[-1]
        assert len(captures) == int(value >= 2)


def test_a_smaller_step_has_a_graph_of_its_own_after_one_eager_step_without_graphs(captures):
    graph, at = StepGraph(2), []
    for size in (4, 4, 4, 2, 4, 2, 4, 2):
        assert graph.run(size, iter([batch(1, size)]), total).item() == 2.0 * size
        at.append([*captures])
        captures.clear()
    # An eager step and a graph never have memory for activations at the same time.
    assert at == [[], [], [4], ["reset"], [4], [2], [], []]
    graph.drop()
    assert captures == ["reset", "reset"]


def test_the_graphs_of_all_sizes_share_their_memory(monkeypatch):
    pools = []

    @contextmanager
    def graph(made, pool, **_):
        pools.append(pool)
        made.pool = lambda: pool or "the first graph's"
        yield

    fakes = SimpleNamespace(
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: None), graph=graph, current_stream=lambda: None
    )
    monkeypatch.setattr(step_graph.torch, "cuda", fakes)
    steps = StepGraph(0)
    for size in (4, 2, 4, 2):
        steps.run(size, iter([batch(1, size)]), total)
    assert pools == [None, "the first graph's"]


def test_a_step_that_cannot_be_captured_is_an_error_of_one_line(monkeypatch):
    @contextmanager
    def graph(*args, **options):
        try:
            yield
        finally:
            raise RuntimeError("the capture was invalidated")

    def compute(_):
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors ...")

    fakes = SimpleNamespace(CUDAGraph=object, graph=graph, current_stream=lambda: None)
    monkeypatch.setattr(step_graph.torch, "cuda", fakes)
    steps = StepGraph(0)
    steps.run(2, iter([batch(1)]), total)
    with pytest.raises(DdpHpcError, match="operation not permitted when stream is capturing") as caught:
        steps.run(2, iter([batch(1)]), compute)
    assert "\n" not in str(caught.value)
    assert "omit --cuda-graph" in str(caught.value)
    row = errors_of_torch.KnownError(Cause.HANG, library="not permitted", words=("capturing",))
    monkeypatch.setattr(errors_of_torch, "KNOWN_ERRORS", (row,))
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        steps.run(2, iter([batch(1)]), compute)


TOKENS = SampleSpec((6,), (6,), 10)
OPTIONS = [
    {},
    {"accumulate": 2, "clip_norm": 0.1},
    {"amp": "bf16"},
    {"optimizer": "adamw", "weight_decay": 0.1, "lr_schedule": "cosine", "warmup_steps": 5},
]


def _losses(options):
    stream = torch.Generator().manual_seed(0)

    def batches():
        while True:
            size = sizes[number] if (number := len(steps.pending.losses)) < len(sizes) else 4
            yield (torch.randint(10, (size, 6), generator=stream),) * 2

    sizes = [4, 4, 4, 4, 4, 2, 4, 4, 2, 4]
    torch.manual_seed(0)
    steps = Steps(decoder(TOKENS, 0.0), batches(), fused=True, **options)
    for size in sizes:
        steps.step(size)
    return steps.losses()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_replayed_steps_have_the_losses_of_plain_steps(options, captures):
    plain = _losses(options)
    assert not captures
    # The learning rate is a float32 tensor instead of a float64 number of the host. A rounding to bfloat16 is
    # up to 4e-3, and where it falls depends on the CPU.
    precision = 1e-2 if "bf16" in options.values() else 1e-5
    assert _losses({**options, "cuda_graph": True}) == pytest.approx(plain, rel=precision)
    assert captures == [4, "reset", 4, 2]
