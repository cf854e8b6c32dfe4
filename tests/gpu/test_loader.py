"""The loader on a CUDA device: pinned buffers, a separate stream, and no buffer reused too early."""

import json

import h5py
import numpy as np
import pytest
import torch

from ddp_hpc.data.open_file import open_samples
from ddp_hpc.training.input.batch_loader import Loader
from tests.gpu.runs import train
from tests.training.runs import succeeded

if not torch.cuda.is_available():
    pytest.skip("no CUDA device (see tests/gpu/test_gpu.py)", allow_module_level=True)

pytestmark = pytest.mark.gpu
NUM_SAMPLES, NUM_VALUES, BATCH_SIZE = 512, 65536, 64


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file.h5"
    numbers = np.arange(NUM_SAMPLES, dtype=np.float32)
    with h5py.File(path, "w") as file:
        file["src"] = np.broadcast_to(numbers[:, None], (NUM_SAMPLES, NUM_VALUES))
        file["tgt"] = np.arange(NUM_SAMPLES)
    return path


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_slow_device_reads_every_batch_before_its_buffer_is_reused(path, ahead):
    device = torch.device("cuda", 0)
    stream = np.random.default_rng(0)
    asked = [stream.integers(0, NUM_SAMPLES, BATCH_SIZE) for _ in range(200)]
    busy = torch.randn(4096, 4096, device=device)
    sums = []
    for src, tgt in Loader(open_samples(path), device, ahead=ahead).batches(asked):
        busy = (busy @ busy).tanh()  # the batch is used long after the next one has been requested
        sums.append((src.amin(dim=1).double() - tgt, src.amax(dim=1).double() - tgt))
    assert len(sums) == len(asked)
    assert all(not low.any() and not high.any() for low, high in sums)


def test_waiting_for_data_overlaps_with_work_of_the_device(tmp_path):
    succeeded(train("--epochs", "1", "--metrics", "m.jsonl", cwd=tmp_path))
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()][5:]
    waited_s, whole_s = (sum(record[name] for record in records) for name in ("data_s", "step_s"))
    print(f"waited for data {waited_s:.4f} s of {whole_s:.4f} s")
    assert all(record["data_s"] >= 0 for record in records)
