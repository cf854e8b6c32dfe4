"""`ddp-hpc bench comm` over NCCL. This has never been run, because it needs two GPUs."""

import json

import pytest
import torch

from tests.training.runs import run, start, succeeded

if torch.cuda.device_count() < 2:
    pytest.skip("NCCL between ranks needs two GPUs", allow_module_level=True)

pytestmark = pytest.mark.gpu


def test_every_collective_is_correct_over_nccl_and_the_transport_is_reported(tmp_path):
    options = ["--bytes", "1MiB", "--iterations", "20", "--json", "comm.json"]
    succeeded(run([*start(2, "torchrun"), "-m", "ddp_hpc", "bench", "comm", *options], tmp_path))
    result = json.loads((tmp_path / "comm.json").read_text())
    assert result["settings"]["backend"] == "nccl"
    assert len(result["rows"]) == 7
    assert all(row["correct"] and row["median_us"] > 0 for row in result["rows"])
    assert sum(result["transport"]["channels"].values()) > 0, result["transport"]
