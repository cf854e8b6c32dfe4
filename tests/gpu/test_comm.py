"""`ddp-hpc bench comm` over NCCL, and its clock. Only run on a GPU beside other tests, where it failed."""

import json
import statistics
import time
from types import SimpleNamespace

import pytest
import torch

from ddp_hpc.bench.comm.timing import _timed_by_device
from tests.training.runs import run, start, succeeded

if not torch.cuda.is_available():
    pytest.skip("no CUDA device (see tests/gpu/test_gpu.py)", allow_module_level=True)

pytestmark = pytest.mark.gpu


def test_the_time_of_the_host_does_not_count():
    device = torch.device("cuda", 0)
    small = torch.zeros(1, device=device)

    def run():
        time.sleep(1e-4)  # the launch of a collective
        small.add_(1)

    times_s = [_timed_by_device(SimpleNamespace(run=run), device) for _ in range(20)]
    assert statistics.median(times_s) < 5e-5


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL between ranks needs two GPUs")
def test_every_collective_is_correct_over_nccl_and_the_transport_is_reported(tmp_path):
    options = ["--bytes", "1MiB", "--iterations", "20", "--json", "comm.json"]
    succeeded(run([*start(2, "torchrun"), "-m", "ddp_hpc", "bench", "comm", *options], tmp_path))
    result = json.loads((tmp_path / "comm.json").read_text())
    assert result["settings"]["backend"] == "nccl"
    assert len(result["rows"]) == 7
    assert all(row["correct"] and row["median_us"] > 0 for row in result["rows"])
    assert sum(result["transport"]["channels"].values()) > 0, result["transport"]
