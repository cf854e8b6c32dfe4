"""Loads batches from a data file to the device, and reads ahead while the device computes.

    file -> reused buffer, pinned for a GPU -> device, on a separate stream

One thread per rank is enough for uncompressed files: reading from the page cache is one copy, during
which NumPy releases the GIL. Decompressing HDF5 takes CPU time and holds the GIL, so `workers` are
processes that do it in parallel.
"""

from __future__ import annotations

import os
import queue
import sys
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_hpc.base.errors import DataError, DdpHpcError
from ddp_hpc.base.option_names import named
from ddp_hpc.base.user_code_exceptions import describe_error, traceback_of
from ddp_hpc.data.samples import ArrayInfo, Samples
from ddp_hpc.training.input.worker_processes import CHECK_S, WorkerProcesses, prepare_worker, timed_out
from ddp_hpc.training.process_group.errors_of_torch import known_cause

Indices: TypeAlias = NDArray[np.int64]
Batch: TypeAlias = tuple[Tensor, Tensor]
T = TypeVar("T")

# The overhead of a read exceeds the time to copy a small batch, so one read combines several batches, up to
# this number of batches and bytes.
_READ_BATCHES = 64
_READ_BYTES = 2**20
_JOIN_S = 1.0
# sun_path has 108 bytes (unix(7)), and multiprocessing appends file names to the directory.
_MAX_SOCKET_DIRECTORY = 60


@dataclass(frozen=True)
class Loader:
    """Loads batches of the samples of a file, as tensors on a device.

    A thread performs up to `ahead` reads in advance; with 0, the caller's thread reads. A read is one batch,
    or several small ones. If `workers` is positive, that many spawned processes read instead. They are
    not forked, because a fork under MPI can hang. Nothing starts before the first batch.
    """

    samples: Samples
    device: torch.device
    workers: int = 0
    ahead: int = 2
    timeout_s: float = 1800.0
    """The time limit for the next batch, in seconds."""

    def batches(self, wanted: Iterable[Indices]) -> Generator[Batch, None, None]:
        """Yields, for each array of sample numbers, src and tgt as tensors in the data type of the file.

        The tensors are valid until the next batch is requested, because the buffers are reused. Closing
        the generator ends its thread or workers.

        Raises:
            DdpHpcError: the file cannot be read, a worker exited, or a batch was not read within `timeout_s`.
        """
        try:
            if self.workers:
                yield from self._from_workers(wanted)
            else:
                yield from self._from_thread(wanted) if self.ahead else self._direct(wanted)
        except DataError as error:
            if known_cause(error):
                raise
            # DataError is a RequestError, with the exit code for an invalid request. During the training, an
            # error of the file is a failure instead.
            failed = DdpHpcError(str(error))
            failed.traceback_text = error.traceback_text
            raise failed from None

    def _direct(self, wanted: Iterable[Indices]) -> Generator[Batch, None, None]:
        slot = _Slot(self.samples, self.device)
        for batches in self._reads(wanted):
            slot.fill(batches)
            yield from slot.batches()

    def _reads(self, wanted: Iterable[Indices]) -> Generator[list[Indices], None, None]:
        most = _READ_BYTES // self.samples.sample_bytes
        batches: list[Indices] = []
        num = 0
        for indices in wanted:
            num += len(indices)
            if batches and (num > most or len(batches) == _READ_BATCHES):
                yield batches
                batches, num = [], len(indices)
            batches.append(indices)
        if batches:
            yield batches

    def _from_thread(self, wanted: Iterable[Indices]) -> Generator[Batch, None, None]:
        free: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        ready: queue.SimpleQueue[_Slot | BaseException | None] = queue.SimpleQueue()
        closed = threading.Event()
        for _ in range(self.ahead + 1):  # one more, because the caller still uses the batches of one buffer
            free.put(_Slot(self.samples, self.device))

        def read() -> None:
            try:
                if self.device.type != "cpu":
                    torch.get_device_module(self.device).set_device(self.device)
                for batches in self._reads(wanted):
                    slot = free.get()
                    if slot is None or closed.is_set():
                        return
                    slot.fill(batches)
                    ready.put(slot)
                ready.put(None)
            except BaseException as error:  # the error is raised in the caller's thread
                ready.put(error)

        # A daemon, because a hanging file system must not keep the process from exiting.
        thread = threading.Thread(target=read, name="read ahead", daemon=True)
        thread.start()
        try:
            while (slot := self._next(ready)) is not None:
                yield from slot.batches()
                free.put(slot)
        finally:
            closed.set()
            free.put(None)
            thread.join(_JOIN_S)  # wait for the thread, because the caller may close the file next

    def _next(self, ready: queue.SimpleQueue[_Slot | BaseException | None]) -> _Slot | None:
        try:
            slot = ready.get(timeout=self.timeout_s)
        except queue.Empty:
            raise timed_out(
                self.timeout_s, str(self.samples.path), "the file system did not answer"
            ) from None
        if isinstance(slot, BaseException):
            raise slot
        return slot

    def _from_workers(self, wanted: Iterable[Indices]) -> Generator[Batch, None, None]:
        _prepare_for_workers()
        loader: Iterable[Batch | DataError] = torch.utils.data.DataLoader(
            _Reads(self.samples),
            sampler=wanted,
            batch_size=None,
            num_workers=self.workers,
            multiprocessing_context="spawn",
            prefetch_factor=max(1, self.ahead),
            pin_memory=self.device.type == "cuda",
            timeout=CHECK_S,
            worker_init_fn=prepare_worker,
            # Otherwise, the DataLoader would draw its seed from the default generator, which dropout uses.
            generator=torch.Generator(),
        )
        copies = DeviceCopies(self.device)
        workers = WorkerProcesses(self.workers, str(self.samples.path), self.timeout_s)
        with closing(workers.batches(lambda: _started(loader))) as batches:
            for batch in batches:
                if isinstance(batch, DataError):
                    raise batch
                src, tgt = copies.of(batch)
                yield src, tgt


def batches_at_once(batch_bytes: int) -> int:
    """Returns how many batches of this size one read combines if there are no workers."""
    return max(1, min(_READ_BATCHES, _READ_BYTES // batch_bytes))


def _stream_of(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


class DeviceCopies:
    """Copies tensors to a device on a stream of its own, in parallel with the work of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else _stream_of(device)

    def of(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns tensors of the CPU on the device, ready for use on the current stream.

        The host would wait for a copy from memory that is not pinned, so such tensors are first copied to
        pinned memory.
        """
        if self._stream is None or not tensors:
            return tensors
        module = torch.get_device_module(self._device)
        pinned = [tensor if tensor.is_pinned() else tensor.pin_memory() for tensor in tensors]
        with module.stream(self._stream):
            copies = [tensor.to(self._device, non_blocking=True) for tensor in pinned]
        current = module.current_stream(self._device)
        current.wait_stream(self._stream)
        for copy in copies:
            copy.record_stream(current)  # the memory is from the copying stream, which could reuse it
        return copies


class _Slot:
    """A reused host buffer for one read, and its copy on the device."""

    def __init__(self, samples: Samples, device: torch.device) -> None:
        self._samples = samples
        self._device = device
        self._sizes: list[int] = []
        self._batches: list[Batch] = []
        self._on_device: Batch | None = None
        self._grow(0)
        if device.type == "cpu":
            return
        self._stream = _stream_of(device)
        self._copied: Any = torch.get_device_module(device).Event()

    def fill(self, batches: list[Indices]) -> None:
        """Reads the samples of some batches, and starts their copy to the device."""
        sizes = [len(indices) for indices in batches]
        num = sum(sizes)
        if self._device.type != "cpu":
            self._on_device = None
            self._copied.synchronize()  # wait, because the previous copy from this buffer may not be complete
        if num > len(self._arrays[0]):
            self._grow(num)
        self._samples.read(batches[0] if len(batches) == 1 else np.concatenate(batches), out=self._arrays)
        if self._device.type != "cpu":
            with torch.get_device_module(self._device).stream(self._stream):
                self._on_device = (
                    self._src[:num].to(self._device, non_blocking=True),
                    self._tgt[:num].to(self._device, non_blocking=True),
                )
                self._copied.record(self._stream)
            self._batches = _split(self._on_device, sizes)
        elif sizes != self._sizes:  # reuse the views: creating them costs as much as copying a small batch
            self._batches = _split((self._src[:num], self._tgt[:num]), sizes)
        self._sizes = sizes

    def batches(self) -> list[Batch]:
        """Returns the tensors of each batch, ready for use on the current stream."""
        if self._on_device is not None:
            stream = torch.get_device_module(self._device).current_stream(self._device)
            stream.wait_event(self._copied)
            for tensor in self._on_device:
                tensor.record_stream(stream)  # the memory is from the copying stream, which could reuse it
        return self._batches

    def _grow(self, num: int) -> None:
        pinned = self._device.type != "cpu"
        self._src = _buffer(self._samples.src, num, pinned)
        self._tgt = _buffer(self._samples.tgt, num, pinned)
        self._arrays = _as_array(self._src), _as_array(self._tgt)
        self._sizes = []


def _split(both: Batch, sizes: list[int]) -> list[Batch]:
    src, tgt = both
    return list(zip(torch.split(src, sizes), torch.split(tgt, sizes), strict=True))


class _Reads(torch.utils.data.Dataset[Batch | DataError]):
    """Reads a batch in a worker. Returns errors as values, because torch would wrap them in a traceback."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, indices: Indices) -> Batch | DataError:
        try:
            src, tgt = self._samples.read(indices)
        except DataError as error:
            return error
        except Exception as error:
            problem = DataError(f"a worker process ({named('workers')}) raised {describe_error(error)}")
            problem.traceback_text = traceback_of(error)
            problem.cause = known_cause(error) or problem.cause  # pickling loses the first error
            return problem
        return as_tensor(src, self._samples.src), as_tensor(tgt, self._samples.tgt)


def as_tensor(array: NDArray[Any], info: ArrayInfo) -> Tensor:
    """Returns a tensor that shares the memory of an array of a data file."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if info.bfloat16 else tensor


def _buffer(info: ArrayInfo, num: int, pinned: bool) -> Tensor:
    dtype = as_tensor(np.empty(0, info.dtype), info).dtype
    return torch.empty((num, *info.shape), dtype=dtype, pin_memory=pinned)


def _as_array(tensor: Tensor) -> NDArray[Any]:
    bits = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    array: NDArray[Any] = bits.numpy()
    return array


def _started(loader: Iterable[T]) -> Iterator[T]:
    """Starts the workers of the loader and returns its iterator, without running the main script again.

    Spawned processes run it to find their functions, but the functions of the workers are in this package,
    and most scripts have no `if __name__ == "__main__":`.
    """
    script = sys.modules["__main__"].__dict__
    hidden: dict[str, Any] = {name: script.pop(name) for name in ("__file__", "__spec__") if name in script}
    script["__spec__"] = None
    try:
        return iter(loader)
    finally:
        script.update(hidden)


def _prepare_for_workers() -> None:
    """Changes the environment of this process, which its workers inherit.

    Workers pass tensors through sockets in TMPDIR, whose path under PBS is too long for a socket
    ("AF_UNIX path too long": https://github.com/python/cpython/issues/93852).
    A filter hides the warning that multiprocessing's resource tracker prints if a signal ends the run.
    """
    if len(tempfile.gettempdir()) > _MAX_SOCKET_DIRECTORY:
        tempfile.tempdir = os.environ["TMPDIR"] = "/tmp"  # noqa: S108 - sockets in a private directory there
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
