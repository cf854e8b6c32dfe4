"""The library in a script on a CUDA device: `make test ARGS="-m gpu"`. Skipped without a device."""

import gzip
import json

import pytest
import torch

from tests.training.runs import run, start, succeeded

if not torch.cuda.is_available():
    pytest.skip(
        "the GPU tests need a CUDA device; run them there: make test ARGS='-m gpu'", allow_module_level=True
    )

pytestmark = pytest.mark.gpu

SCRIPT = """
import sys
import torch
from torch import nn
import ddp_hpc

with ddp_hpc.distributed(device=sys.argv[1]) as world:
    torch.manual_seed(0)
    src = torch.rand(50, 4, dtype=torch.float64)
    model = ddp_hpc.wrap(nn.Linear(4, 1).double(), strategy=sys.argv[2])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = world.loader((src, src.sum(dim=1, keepdim=True)), batch_size=8, epochs=2)
    with (
        ddp_hpc.snapshots("run-" + sys.argv[1], model=model, optimizer=optimizer, loader=loader) as snapshots,
        ddp_hpc.tracing("traces-" + sys.argv[1]) as trace,
    ):
        kept = []
        for batch in loader:
            assert batch.src.device == world.device
            kept.append(batch.src)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch.src), batch.tgt) * batch.weight
            loss.backward()
            optimizer.step()
            trace.step()
            mean = world.sum(loss.detach().clone()) / world.world_size
            world.say(f"{mean.item():.12f}")
            if snapshots.step(batch.step):
                break
"""


def _losses(tmp_path, device, strategy="ddp", ranks=1):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = succeeded(
        run([*start(ranks, "torchrun" if ranks > 1 else "mpiexec"), "script.py", device, strategy], tmp_path)
    )
    return [float(line) for line in done.stdout.splitlines()]


def test_a_script_has_the_same_losses_on_the_gpu_and_its_trace_has_the_kernels(tmp_path):
    on_gpu, on_cpu = (_losses(tmp_path, device) for device in ("cuda", "cpu"))
    assert len(on_gpu) == 14
    assert on_gpu == pytest.approx(on_cpu, rel=1e-9)
    [trace] = (tmp_path / "traces-cuda").glob("*.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


def test_a_script_on_the_gpu_resumes_from_its_snapshot(tmp_path):
    assert len(_losses(tmp_path, "cuda")) == 14
    assert _losses(tmp_path, "cuda") == [], "all steps were done"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_per_gpu_shards_the_samples_of_a_step(tmp_path, strategy):
    if (ranks := torch.cuda.device_count()) < 2:
        pytest.skip("NCCL between ranks needs two GPUs")
    assert len(_losses(tmp_path, "cuda", strategy, ranks)) == 2 * -(-50 // (8 * ranks))
