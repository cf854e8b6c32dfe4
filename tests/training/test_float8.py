"""`--fp8`: which layers are converted, and when it is rejected. The products are emulated on a CPU."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from ddp_hpc.base.errors import RequestError
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.optimization.config import OptimizationConfig
from ddp_hpc.training.optimization.float8 import check_fp8, use_fp8
from ddp_hpc.training.parallel.model_layers import blocks_of
from ddp_hpc.training.tasks.decoder import decoder
from ddp_hpc.training.tasks.task import SampleSpec

from .one_process import Steps

GPU = torch.device("cuda", 0)
with_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


def refusal(monkeypatch, *, device=GPU, capability=(9, 0), amp="bf16", installed=True):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(name=name) if installed else None
    )
    try:
        check_fp8(OptimizationConfig(fp8=True, amp=amp), device)
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, ""),
        ({"device": torch.device("cpu")}, "--fp8 needs a CUDA device, but this rank uses cpu"),
        ({"capability": (8, 0)}, "NVIDIA A100-SXM4-40GB does not support matrix products in float8"),
        ({"amp": "off"}, "--fp8 needs --amp bf16 (got --amp off)"),
        ({"installed": False}, "--fp8 needs torchao, which is not installed: pip install torchao"),
    ],
)
def test_fp8_is_rejected_in_one_line_where_it_cannot_run(monkeypatch, facts, words):
    line = refusal(monkeypatch, **facts)
    assert line.startswith(words) or words in line
    assert bool(line) == bool(words)
    assert "\n" not in line


@pytest.mark.parametrize(
    ("architecture", "has_float8"),
    [("gfx90a:sramecc+:xnack-", False), ("gfx942:sramecc+:xnack-", True), ("gfx950", True)],
)
def test_amd_gpus_are_judged_by_their_architecture(architecture, has_float8, monkeypatch):
    # In torch, the MI250X, which has no float8, has the compute capability 9.0, like the H100.
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    properties = SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    line = refusal(monkeypatch)
    assert line == "" if has_float8 else "does not support matrix products in float8" in line


@pytest.mark.parametrize("options", [{"strategy": "tp"}, {"mesh": "fsdp=2,tp=2"}])
def test_fp8_is_rejected_with_tensor_parallelism(options):
    with pytest.raises(RequestError, match="--fp8 cannot be used with tp"):
        TrainConfig.of(fp8=True, amp="bf16", **options)


def made(width=32):
    torch.manual_seed(0)
    return decoder(SampleSpec((16,), (16,), 100), 0.0, layers=2, heads=2, width=width)


@with_torchao
def test_the_layers_of_the_blocks_are_converted_and_names_do_not_change():
    task = made()
    names = list(task.model.state_dict())
    assert use_fp8(blocks_of(task.model), emulate=True) == 2 * 4
    converted = {name for name, one in task.model.named_modules() if type(one).__name__ == "Float8Linear"}
    assert {name.rpartition(".")[2] for name in converted} == {"qkv", "out", "up", "down"}
    assert list(task.model.state_dict()) == names


@with_torchao
def test_a_model_without_suitable_layers_is_rejected():
    with pytest.raises(RequestError, match="sizes that are multiples of 16"):
        use_fp8(blocks_of(made(width=24).model), emulate=True)


@with_torchao
def test_losses_with_rounding_to_float8_are_close(monkeypatch):
    def batches():
        draw = torch.Generator().manual_seed(1)
        while True:
            yield tuple(torch.randint(100, (8, 16), generator=draw) for _ in range(2))

    losses = []
    for converts in (False, True):
        task = made()
        if converts:
            use_fp8(blocks_of(task.model), emulate=True)
            # torchao asks for the type on a GPU
            monkeypatch.setattr(torch, "get_autocast_gpu_dtype", lambda: torch.bfloat16)
        steps = Steps(task, batches(), amp="bf16")
        for _ in range(5):
            steps.step(8)
        losses.append(steps.losses())
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert losses[1] != losses[0]
