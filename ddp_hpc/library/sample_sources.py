"""Where the samples of `world.loader` come from: a data file, two arrays in memory, or a Dataset of torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddp_hpc.data.samples import Samples
from ddp_hpc.library.batch import map_values
from ddp_hpc.training.input.batch_loader import DeviceCopies, Loader
from ddp_hpc.training.input.worker_processes import CHECK_S, WorkerProcesses, prepare_worker

Indices: TypeAlias = NDArray[np.int64]
Wanted: TypeAlias = Iterator[tuple[int, Indices]]
"""For each batch, a seed for random transformations in workers, and the numbers of its samples."""
Read: TypeAlias = Callable[[list[int]], Any]


class Source(Protocol):
    """Samples that can be read by index."""

    @property
    def num_samples(self) -> int:
        """The number of samples."""

    def batches(self, wanted: Wanted, device: torch.device) -> Generator[Any, None, None]:
        """Yields the samples of each batch, combined to tensors on the device."""


@dataclass(frozen=True)
class PairSource:
    """The samples of a data file, or of a pair of arrays in memory. A thread reads ahead."""

    samples: Samples
    workers: int
    timeout_s: float

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return self.samples.num_samples

    def batches(self, wanted: Wanted, device: torch.device) -> Generator[Any, None, None]:
        """Yields the samples of each batch as a pair of tensors (src, tgt) on the device."""
        loader = Loader(self.samples, device, workers=self.workers, timeout_s=self.timeout_s)
        with closing(loader.batches(numbers for _, numbers in wanted)) as batches:
            for src, tgt in batches:
                # The reader reuses its buffers, but a script can keep its batches.
                yield (src.clone(), tgt.clone()) if device.type == "cpu" else (src, tgt)


@dataclass(frozen=True)
class WorkerOptions:
    """The options of a DataLoader for its worker processes."""

    num_workers: int = 0
    prefetch_factor: int | None = None
    multiprocessing_context: Any = None
    worker_init_fn: Callable[[int], None] | None = None


@dataclass(frozen=True)
class DatasetSource:
    """The samples of a map-style Dataset.

    Without workers, the main thread reads: random transformations then use the generators of the rank, whose
    states are part of a snapshot. In workers, they use generators that are seeded for each batch.
    """

    read: Read
    num_samples: int
    timeout_s: float
    workers: WorkerOptions = field(default_factory=WorkerOptions)

    def batches(self, wanted: Wanted, device: torch.device) -> Generator[Any, None, None]:
        """Yields the samples of each batch on the device, as `read` has combined them."""
        copies = DeviceCopies(device)
        reads = self._from_workers(wanted, device) if self.workers.num_workers else self._direct(wanted)
        with closing(reads):
            for data in reads:
                yield _moved(data, device, copies)

    def _direct(self, wanted: Wanted) -> Generator[Any, None, None]:
        for _, numbers in wanted:
            yield self.read(numbers.tolist())

    def _from_workers(self, wanted: Wanted, device: torch.device) -> Generator[Any, None, None]:
        options = self.workers
        loader: DataLoader[Any] = DataLoader(
            _SeededReads(self.read),
            sampler=((seed, numbers.tolist()) for seed, numbers in wanted),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=options.num_workers,
            prefetch_factor=options.prefetch_factor,
            multiprocessing_context=options.multiprocessing_context,
            worker_init_fn=partial(_start_worker, options.worker_init_fn),
            pin_memory=device.type == "cuda",
            timeout=CHECK_S,
            # Otherwise, the DataLoader would draw its seed from the default generator, which dropout uses.
            generator=torch.Generator(),
        )
        workers = WorkerProcesses(options.num_workers, "the dataset", self.timeout_s)
        return workers.batches(lambda: iter(loader))


class _SeededReads(Dataset[Any]):
    """Reads a batch in a worker, with random numbers that depend only on the batch."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __getitem__(self, batch: Any) -> Any:
        seed, numbers = batch
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return self._read(numbers)


def _unchanged(data: Any) -> Any:
    return data


def _start_worker(own: Callable[[int], None] | None, number: int) -> None:
    prepare_worker(number)
    if own is not None:
        own(number)


def reads_items(dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> Read:
    """Returns a function that reads samples of a map-style Dataset and combines them."""
    return partial(_read_items, dataset, collate_fn)


def _read_items(dataset: Any, collate_fn: Callable[[list[Any]], Any], numbers: list[int]) -> Any:
    # torch's DataLoader also prefers this method, for example that of Hugging Face's datasets.
    read_all = getattr(dataset, "__getitems__", None)
    return collate_fn(read_all(numbers) if read_all else [dataset[number] for number in numbers])


def _moved(data: Any, device: torch.device, copies: DeviceCopies) -> Any:
    """Returns the data with its tensors, and other objects that have a method `to`, on the device."""
    tensors: list[Tensor] = []
    map_values(lambda value: tensors.append(value) if _is_on_cpu(value) else None, data)
    on_device = iter(copies.of(tensors))

    def move(value: Any) -> Any:
        if _is_on_cpu(value):
            return next(on_device)
        return value.to(device, non_blocking=True) if hasattr(value, "to") else value

    return map_values(move, data)


def _is_on_cpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"
