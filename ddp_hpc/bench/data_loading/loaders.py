"""The loaders to compare: the trainer's own loader and several others.

Each is an endless iterator of batches (src, tgt) in the given order. A batch is valid only until
the next one is requested.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ddp_hpc.data.open_file import open_samples
from ddp_hpc.training.input.batch_loader import Loader

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Batches: TypeAlias = Generator[Batch, None, None]
Order: TypeAlias = Sequence[NDArray[np.int64]]
"""The sample numbers of the batches of an epoch; all batches have the same size."""
Arrays: TypeAlias = tuple[NDArray[Any], NDArray[Any]]


def memcpy(arrays: Arrays, order: Order) -> Batches:
    """Copies contiguous samples into reused buffers of the size of a batch: the lower limit of the time.

    The copies advance through the arrays, so that the source is in memory and not in a processor cache.
    """
    size = len(order[0])
    src, tgt = (np.ones_like(array[:size]) for array in arrays)
    batch = torch.from_numpy(src), torch.from_numpy(tgt)
    while True:
        for start in range(0, len(arrays[0]) - size + 1, size):
            np.copyto(src, arrays[0][start : start + size])
            np.copyto(tgt, arrays[1][start : start + size])
            yield batch


def memory(arrays: Arrays, order: Order) -> Batches:
    """Reads a TensorDataset in memory with a DataLoader, the usual method."""
    yield from _through_data_loader(TensorDataset(*map(torch.from_numpy, arrays)), order)


def memory_indexed(arrays: Arrays, order: Order) -> Batches:
    """Indexes tensors in memory, one batch at a time."""
    src, tgt = map(torch.from_numpy, arrays)
    for numbers in cycle(map(torch.from_numpy, order)):
        yield src[numbers], tgt[numbers]


class NaiveHdf5(Dataset[Batch]):
    """The dataset of many tutorials: the file is opened in the constructor and read sample by sample."""

    def __init__(self, path: Path, src_key: str, tgt_key: str) -> None:
        self.file = h5py.File(path, "r", locking=False)
        self.src, self.tgt = self.file[src_key], self.file[tgt_key]

    def __len__(self) -> int:
        return len(self.src)

    def __getitem__(self, number: int) -> Batch:
        return torch.as_tensor(self.src[number]), torch.as_tensor(self.tgt[number])


def naive_hdf5(path: Path, keys: tuple[str, str], order: Order) -> Batches:
    """Reads NaiveHdf5 with a DataLoader, which is the baseline."""
    dataset = NaiveHdf5(path, *keys)
    with dataset.file:
        yield from _through_data_loader(dataset, order)


def h5py_batch(path: Path, keys: tuple[str, str], order: Order) -> Batches:
    """Reads each batch with one h5py call per array, in ascending order as h5py requires."""
    with h5py.File(path, "r", locking=False) as file:
        src, tgt = file[keys[0]], file[keys[1]]
        for numbers in cycle(order):
            ascending = np.sort(numbers)
            yield torch.from_numpy(src[ascending]), torch.from_numpy(tgt[ascending])


def reader(path: Path, keys: tuple[str, str], order: Order, *, workers: int = 0, ahead: int = 0) -> Batches:
    """Reads with the trainer's loader on the CPU."""
    samples = open_samples(path, src_key=keys[0], tgt_key=keys[1])
    try:
        loader = Loader(samples, torch.device("cpu"), workers=workers, ahead=ahead)
        yield from loader.batches(cycle(order))
    finally:
        samples.close()


def _through_data_loader(dataset: Dataset[Any], order: Order) -> Batches:
    # The sampler is a list of integers, like those of torch's samplers, so that all loaders read in the same
    # order.
    loader = DataLoader(dataset, batch_size=len(order[0]), sampler=np.concatenate(order).tolist())
    while True:
        yield from loader
