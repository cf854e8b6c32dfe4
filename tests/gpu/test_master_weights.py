"""`--param-dtype bf16` and `--moment-dtype bf16` on one GPU, compared with torch's own fused optimizers.

This has never been run: no GPU was available. Graphs and steps without waits of the host are in
test_whole_steps.py.
"""

import pytest
import torch
from torch import nn

from ddp_hpc.training.optimization.master_weights import AdamW, to_bf16
from tests.gpu.runs import reference_losses, train, trained_losses
from tests.training.runs import SMALL, succeeded

if not torch.cuda.is_available():
    pytest.skip("no CUDA device (see tests/gpu/test_gpu.py)", allow_module_level=True)

pytestmark = pytest.mark.gpu
RUN = ["--num-samples", "160", "--epochs", "1", "--batch-size", "16", *SMALL, "--dropout", "0"]
BOTH = ["--param-dtype", "bf16", "--moment-dtype", "bf16"]


def test_master_weights_equal_the_parameters_of_torchs_fused_optimizer_bit_for_bit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5))
    model.cuda().to(memory_format=torch.channels_last)
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    masters = to_bf16(model)
    own = [masters.get(parameter, parameter) for parameter in model.parameters()]
    trained = {master: parameter for parameter, master in masters.items()}
    optimizer = AdamW(own, trained=trained, fused=True)
    oracle = torch.optim.AdamW(copies, fused=True)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8, 8, device="cuda")).square().sum().backward()
        for parameter, copy in zip(model.parameters(), copies, strict=True):
            copy.grad = parameter.grad.float()
        optimizer.step()
        oracle.step()
        for master, copy in zip(own, copies, strict=True):
            assert torch.equal(master, copy)


@pytest.mark.parametrize("options", [BOTH[:2], BOTH[2:], BOTH, [*BOTH, "--compile"]], ids=" ".join)
@pytest.mark.parametrize("group", ["", "--single-rank-group"])
def test_losses_are_close_to_those_of_mixed_precision(tmp_path, options, group):
    expected = reference_losses(*RUN, "--amp", "bf16")
    found = trained_losses(*RUN, *options, *group.split(), cwd=tmp_path, timeout_s=300.0)
    assert found == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize(
    "options", [BOTH, [*BOTH[2:], "--strategy", "zero"], [*BOTH[2:], "--strategy", "fsdp", "--amp", "bf16"]]
)
def test_a_resumed_run_has_the_same_losses_bit_for_bit(tmp_path, options):
    words = [*RUN, "--single-rank-group", "--dropout", "0.1", *options]
    whole = trained_losses(*words, cwd=tmp_path, timeout_s=300.0)
    saving = ["--snapshot-dir", "snapshots"]
    begun = trained_losses(*words, *saving, "--max-steps", "4", cwd=tmp_path, timeout_s=300.0)
    assert begun + trained_losses(*words, *saving, cwd=tmp_path, timeout_s=300.0) == whole


def test_moments_in_bfloat16_work_with_offloaded_parameters(tmp_path):
    options = ["--strategy", "fsdp", "--cpu-offload", "--single-rank-group"]
    succeeded(train(*RUN, *options, *BOTH[2:], cwd=tmp_path, timeout_s=300.0))


BATCH_NORM = """
import torch
from torch import nn
from ddp_hpc.training.tasks.task import Task


def net():
    numbers = torch.rand(64, 8, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
    return Task(model=model, dataset=(numbers, numbers.flip(0)))
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL between ranks needs two GPUs")
def test_batch_norms_are_synchronized_in_float32(tmp_path):
    (tmp_path / "mine.py").write_text(BATCH_NORM)
    words = ["--model", "mine:net", "--epochs", "2", "--batch-size", "4", "--sync-batchnorm", *BOTH]
    succeeded(train(*words, cwd=tmp_path, ranks=2, launcher="torchrun", timeout_s=300.0))
