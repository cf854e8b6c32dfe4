"""The decoder's attention kernels, the memory of its loss and compiled steps, on one GPU.

Run on one H200: see docs/reference/what-has-been-run.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_hpc.training.optimization.step_graph import use_one_stream
from ddp_hpc.training.tasks.decoder import decoder
from ddp_hpc.training.tasks.linear_cross_entropy import linear_cross_entropy
from ddp_hpc.training.tasks.task import SampleSpec, Task
from tests.training.one_process import Steps

if not torch.cuda.is_available():
    pytest.skip("no CUDA device (see tests/gpu/test_gpu.py)", allow_module_level=True)

pytestmark = pytest.mark.gpu
VOCABULARY, LENGTH = 1001, 128
FAST = {"aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_cudnn_attention"}


def made(dropout: float = 0.0) -> Task:
    torch.manual_seed(0)
    return decoder(SampleSpec((LENGTH,), (LENGTH,), VOCABULARY), dropout, layers=2, heads=4, width=256)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    stored = torch.randint(VOCABULARY, (2, 16, LENGTH), device="cuda")
    while True:
        yield stored[0], stored[1]


def losses(num: int, task: Task | None = None, **options: object) -> list[float]:
    steps = Steps(task or made(), batches(), "cuda:0", amp="bf16", **options)
    for _ in range(num):
        steps.step(16)
    return steps.losses()


class Copies(TorchDispatchMode):
    """Records the sizes of tensors that are copied to be contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_runs_in_a_flash_or_cudnn_kernel_without_copies(dropout):
    model = made(dropout).model.cuda()
    tokens = next(batches())[0]
    with (
        torch.autocast("cuda", dtype=torch.bfloat16),
        profile(activities=[ProfilerActivity.CPU]) as recorded,
    ):
        model(tokens, tokens)
    assert FAST & {event.key for event in recorded.key_averages()}
    with torch.autocast("cuda", dtype=torch.bfloat16), Copies() as copies:
        model(tokens, tokens)
    # Inputs are converted to bfloat16, but queries, keys and values are not copied by head.
    assert [shape for shape in copies.shapes if len(shape) > 3] == []


def peak_bytes(function, *values: Tensor) -> int:
    for _ in range(2):  # the first pass also allocates workspaces
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = function(*values)
        torch.autograd.grad(loss, values[:2])
    return torch.cuda.max_memory_allocated() - before


def plain(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, weight), labels)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_loss_needs_about_half_of_the_memory_of_torchs_functions(is_compiled):
    x = torch.randn(16384, 256, device="cuda", requires_grad=True)
    weight = torch.randn(50257, 256, device="cuda", requires_grad=True)
    labels = torch.randint(50257, (16384,), device="cuda")
    function = torch.compile(linear_cross_entropy) if is_compiled else linear_cross_entropy
    assert peak_bytes(function, x, weight, labels) < 0.55 * peak_bytes(plain, x, weight, labels)


def test_loss_and_gradients_are_those_of_torchs_functions():
    x = torch.randn(700, 256, device="cuda", requires_grad=True)
    weight = torch.randn(VOCABULARY, 256, device="cuda", requires_grad=True)
    labels = torch.randint(VOCABULARY, (700,), device="cuda")
    found = []
    for function in (linear_cross_entropy, plain):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = function(x, weight, labels)
        found.append((loss, *torch.autograd.grad(loss, (x, weight))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.01 * float(theirs.detach().abs().max()))


def test_compiled_steps_have_the_losses_of_eager_steps():
    assert losses(10, compile="default") == pytest.approx(losses(10), rel=5e-3)


def test_graphs_of_whole_steps_have_the_losses_of_eager_steps():
    eager = losses(20)
    with torch.cuda.stream(torch.cuda.current_stream()):  # restores the stream after the test
        use_one_stream(torch.device("cuda", 0))
        assert losses(20, cuda_graph=True) == pytest.approx(eager, rel=2e-3)
        assert losses(20, cuda_graph=True, compile="default") == pytest.approx(eager, rel=5e-3)
