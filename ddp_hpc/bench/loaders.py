"""Ways to get a batch: the trainer's own, and those it is compared with.

Each is an endless iterator of (src, tgt), a batch of the given order at a time.
A batch is only good until the next one is asked for.
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

from ddp_hpc.data.formats import open_samples
from ddp_hpc.training.loader import Loader

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Batches: TypeAlias = Generator[Batch, None, None]
Order: TypeAlias = Sequence[NDArray[np.int64]]
"""The sample numbers of each batch of an epoch, equally many in each."""
Arrays: TypeAlias = tuple[NDArray[Any], NDArray[Any]]


def memcpy(arrays: Arrays, order: Order) -> Batches:
    """The floor: as many samples as a batch has, lying together, copied into buffers that are used again.

    The copies walk through the arrays: the source is in memory, as a data set is, not in a core's cache.
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
    """The usual way from memory: a TensorDataset behind a DataLoader."""
    yield from _through_data_loader(TensorDataset(*map(torch.from_numpy, arrays)), order)


def memory_indexed(arrays: Arrays, order: Order) -> Batches:
    """Tensors in memory, indexed a batch at a time."""
    src, tgt = map(torch.from_numpy, arrays)
    for numbers in cycle(map(torch.from_numpy, order)):
        yield src[numbers], tgt[numbers]


def memory_gather(arrays: Arrays, order: Order) -> Batches:
    """Samples copied out of memory one by one, into buffers that are used again: no file can do better."""
    src, tgt = (np.ones_like(array[: len(order[0])]) for array in arrays)
    batch = torch.from_numpy(src), torch.from_numpy(tgt)
    for numbers in cycle(order):
        np.take(arrays[0], numbers, axis=0, out=src, mode="clip")
        np.take(arrays[1], numbers, axis=0, out=tgt, mode="clip")
        yield batch


class NaiveHdf5(Dataset[Batch]):
    """What tutorials show and nobody should use: opened by the constructor, one read a sample and array."""

    def __init__(self, path: Path, src_key: str, tgt_key: str) -> None:
        self.file = h5py.File(path, "r", locking=False)
        self.src, self.tgt = self.file[src_key], self.file[tgt_key]

    def __len__(self) -> int:
        return len(self.src)

    def __getitem__(self, number: int) -> Batch:
        return torch.as_tensor(self.src[number]), torch.as_tensor(self.tgt[number])


def naive_hdf5(path: Path, keys: tuple[str, str], order: Order) -> Batches:
    """The baseline: NaiveHdf5 behind a DataLoader."""
    dataset = NaiveHdf5(path, *keys)
    with dataset.file:
        yield from _through_data_loader(dataset, order)


def h5py_batch(path: Path, keys: tuple[str, str], order: Order) -> Batches:
    """h5py alone, one read a batch and array: ascending numbers, as it wants them, left in that order."""
    with h5py.File(path, "r", locking=False) as file:
        src, tgt = file[keys[0]], file[keys[1]]
        for numbers in cycle(order):
            ascending = np.sort(numbers)
            yield torch.from_numpy(src[ascending]), torch.from_numpy(tgt[ascending])


def reader(path: Path, keys: tuple[str, str], order: Order, *, workers: int = 0, ahead: int = 0) -> Batches:
    """The trainer's own loader on the CPU."""
    samples = open_samples(path, src_key=keys[0], tgt_key=keys[1])
    try:
        loader = Loader(samples, torch.device("cpu"), workers=workers, ahead=ahead)
        yield from loader.batches(cycle(order))
    finally:
        samples.close()


def _through_data_loader(dataset: Dataset[Any], order: Order) -> Batches:
    # A list of ints is what torch's own samplers make; so every loader reads in the same order.
    loader = DataLoader(dataset, batch_size=len(order[0]), sampler=np.concatenate(order).tolist())
    while True:
        yield from loader
