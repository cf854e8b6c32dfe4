"""Records the loop of the lesson with data in memory, from HDF5 sample by sample, and from our loader.

`python -m tests.trace.three_loaders DIR` writes DIR/memory, DIR/naive_hdf5 and DIR/our_hdf5.
"""

import sys
from pathlib import Path

import h5py
import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from data_gen import Recipe, generate
from ddp_hpc.bench.io import loaders

NUM_SAMPLES, BATCH_SIZE = 1024, 128
ACTIVE = 30
KEYS = ("src", "tgt")


def main(argv: list[str]) -> None:
    directory = Path(argv[0])
    torch.set_num_threads(1)
    data = directory / "data.h5"
    generate(Recipe(num_samples=NUM_SAMPLES), data)
    with h5py.File(data) as file:
        arrays = file["src"][:], file["tgt"][:]
    numbers = np.random.default_rng(0).permutation(NUM_SAMPLES)
    order = [numbers[start : start + BATCH_SIZE] for start in range(0, NUM_SAMPLES, BATCH_SIZE)]
    for name, batches in {
        "memory": loaders.memory(arrays, order),
        "naive_hdf5": loaders.naive_hdf5(data, KEYS, order),
        "our_hdf5": loaders.reader(data, KEYS, order, ahead=2),
    }.items():
        (directory / name).mkdir()
        _train(batches, directory / name / "trace-0-of-1.json.gz")
        batches.close()
    sys.exit(0)


def _train(batches: loaders.Batches, trace: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.Adam(model.parameters())
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=4, active=ACTIVE, repeat=1)
    ) as profiler:
        for _ in range(5 + ACTIVE):
            with record_function("data"):
                src, tgt = next(batches)
            with record_function("forward"):
                loss = (model(src) - tgt.mean(dim=1, keepdim=True)).square().mean()
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(trace))


if __name__ == "__main__":
    main(sys.argv[1:])
