"""Batches on their way from the file to the device, read ahead while the device computes.

    file -> reused buffer, pinned where the device is not a CPU -> device, on a stream of its own

One thread does this for a rank: reading out of the page cache costs one copy, and
NumPy releases the interpreter's lock meanwhile. Compressed HDF5 keeps a core busy
and the lock held; `workers` are processes that unpack it side by side.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_hpc.data.samples import ArrayInfo, Samples, first_line
from ddp_hpc.errors import DataError, DdpHpcError
from ddp_hpc.training.health.preemption import SIGNALS
from ddp_hpc.user_errors import describe_error, traceback_of

Indices: TypeAlias = NDArray[np.int64]
Batch: TypeAlias = tuple[Tensor, Tensor]
T = TypeVar("T")

# A small batch costs less to copy than to ask for: so many are read at once, while they have so few bytes.
_READ_BATCHES = 64
_READ_BYTES = 2**20
_FAREWELL_S = 1.0
_PR_SET_PDEATHSIG = 1
# sun_path has 108 bytes (unix(7)), and multiprocessing appends names of its own to the folder.
_MAX_SOCKET_FOLDER = 60


class Loader:
    """The samples of a file in batches of any numbers, as tensors on a device.

    `ahead` reads are done before their batches are asked for, by a thread; 0 reads in
    the caller's. A read is one batch, or several small ones. `workers` above 0 reads in
    that many spawned processes instead: never forked ones, as a fork under MPI can hang.
    Nothing starts before the first batch.
    """

    def __init__(
        self,
        samples: Samples,
        device: torch.device,
        *,
        workers: int = 0,
        ahead: int = 2,
        timeout_s: float = 1800.0,
    ) -> None:
        self._samples = samples
        self._device = device
        self._workers = workers
        self._ahead = ahead
        self._timeout_s = timeout_s

    def batches(self, wanted: Iterable[Indices]) -> Generator[Batch, None, None]:
        """The tensors src and tgt (len(indices), ...) of each array of sample numbers, in the file's dtype.

        They are valid until the next batch is asked for: the buffers are used again. Closing
        the generator ends its thread or its workers.

        Raises:
            DdpHpcError: the file cannot be read, a worker ended, or a batch did not come within `timeout_s`.
        """
        try:
            if self._workers:
                yield from self._from_workers(wanted)
            else:
                yield from self._from_thread(wanted) if self._ahead else self._direct(wanted)
        except DataError as error:
            # Work has begun: what fails now is no longer a wrong request.
            failed = DdpHpcError(str(error))
            failed.traceback_text = error.traceback_text
            raise failed from None

    def _direct(self, wanted: Iterable[Indices]) -> Generator[Batch, None, None]:
        slot = _Slot(self._samples, self._device)
        for several in self._reads(wanted):
            slot.fill(several)
            yield from slot.batches()

    def _reads(self, wanted: Iterable[Indices]) -> Generator[list[Indices], None, None]:
        most = _READ_BYTES // self._samples.sample_bytes
        several: list[Indices] = []
        num = 0
        for indices in wanted:
            num += len(indices)
            if several and (num > most or len(several) == _READ_BATCHES):
                yield several
                several, num = [], len(indices)
            several.append(indices)
        if several:
            yield several

    def _from_thread(self, wanted: Iterable[Indices]) -> Generator[Batch, None, None]:
        free: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        ready: queue.SimpleQueue[_Slot | BaseException | None] = queue.SimpleQueue()
        closed = threading.Event()
        for _ in range(self._ahead + 1):  # one more is in the caller's hands
            free.put(_Slot(self._samples, self._device))

        def read() -> None:
            try:
                if self._device.type != "cpu":
                    torch.get_device_module(self._device).set_device(self._device)
                for several in self._reads(wanted):
                    slot = free.get()
                    if slot is None or closed.is_set():
                        return
                    slot.fill(several)
                    ready.put(slot)
                ready.put(None)
            except BaseException as error:  # it is the caller's, whatever it is
                ready.put(error)

        # A thread that a dead file system holds must not hold the process.
        thread = threading.Thread(target=read, name="read ahead", daemon=True)
        thread.start()
        try:
            while (slot := self._next(ready)) is not None:
                yield from slot.batches()
                free.put(slot)
        finally:
            closed.set()
            free.put(None)
            thread.join(_FAREWELL_S)  # the caller may close the file next

    def _next(self, ready: queue.SimpleQueue[_Slot | BaseException | None]) -> _Slot | None:
        try:
            found = ready.get(timeout=self._timeout_s)
        except queue.Empty:
            raise self._late("no answer from its file system") from None
        if isinstance(found, BaseException):
            raise found
        return found

    def _from_workers(self, wanted: Iterable[Indices]) -> Generator[Batch, None, None]:
        _prepare_for_workers()
        loader: Iterable[Batch | DataError] = torch.utils.data.DataLoader(
            _Reads(self._samples),
            sampler=wanted,
            batch_size=None,
            num_workers=self._workers,
            multiprocessing_context="spawn",
            prefetch_factor=max(1, self._ahead),
            pin_memory=self._device.type == "cuda",
            timeout=self._timeout_s,
            worker_init_fn=_leave_signals_to_the_rank,
            generator=torch.Generator(),  # it draws a seed: not out of the stream that dropout draws from
        )
        stream = None if self._device.type == "cpu" else _stream_of(self._device)
        try:
            for batch in _started(loader):
                if isinstance(batch, DataError):
                    raise batch
                yield batch if stream is None else _copied(batch, self._device, stream)
        except (RuntimeError, OSError, EOFError) as error:
            if "timed out" in str(error):
                raise self._late(f"{self._workers} workers") from None
            # A worker that is gone in the middle of a batch shows as a dead socket; and there may be too
            # many open files to start one.
            text = explain_lost_worker(error)
            if not text and isinstance(error, RuntimeError):
                raise
            raise DdpHpcError(
                f"reading {self._samples.path} with --workers {self._workers}: {text or first_line(error)}"
            ) from None

    def _late(self, who: str) -> DdpHpcError:
        return DdpHpcError(
            f"waited {self._timeout_s:g} s for samples of {self._samples.path}: {who}. "
            "Check the file system, or raise --timeout"
        )


def batches_at_once(batch_bytes: int) -> int:
    """How many batches of this size one read has, where no workers read."""
    return max(1, min(_READ_BATCHES, _READ_BYTES // batch_bytes))


def explain_lost_worker(error: BaseException) -> str:
    """One line where `error` is torch's about a worker that ended; empty for any other.

    torch raises it out of a SIGCHLD handler: wherever the main thread is, in the
    middle of a backward pass too.
    """
    if not (isinstance(error, RuntimeError) and "DataLoader worker" in str(error)):
        return ""
    return f"{first_line(error)} (if a job runs out of memory, the kernel kills such processes first)"


def _stream_of(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


def _copied(batch: Batch, device: torch.device, stream: Any) -> Batch:
    """The batch on the device, for the current stream to use; it is copied beside what that computes."""
    module = torch.get_device_module(device)
    with module.stream(stream):
        src, tgt = (tensor.to(device, non_blocking=True) for tensor in batch)
    current = module.current_stream(device)
    current.wait_stream(stream)
    for tensor in (src, tgt):
        tensor.record_stream(current)  # their memory belongs to the copying stream
    return src, tgt


class _Slot:
    """A reused buffer for one read, and where it goes on the device."""

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

    def fill(self, several: list[Indices]) -> None:
        """Reads the samples of some batches, and starts their copy to the device."""
        sizes = [len(indices) for indices in several]
        num = sum(sizes)
        if self._device.type != "cpu":
            self._on_device = None
            self._copied.synchronize()  # the buffer's last contents may still be on their way
        if num > len(self._arrays[0]):
            self._grow(num)
        self._samples.read(several[0] if len(several) == 1 else np.concatenate(several), out=self._arrays)
        if self._device.type != "cpu":
            with torch.get_device_module(self._device).stream(self._stream):
                self._on_device = (
                    self._src[:num].to(self._device, non_blocking=True),
                    self._tgt[:num].to(self._device, non_blocking=True),
                )
                self._copied.record(self._stream)
            self._batches = _split(self._on_device, sizes)
        elif sizes != self._sizes:  # views cost as much as a small batch's copy
            self._batches = _split((self._src[:num], self._tgt[:num]), sizes)
        self._sizes = sizes

    def batches(self) -> list[Batch]:
        """Each batch's tensors, for the current stream to use."""
        if self._on_device is not None:
            stream = torch.get_device_module(self._device).current_stream(self._device)
            stream.wait_event(self._copied)
            for tensor in self._on_device:
                tensor.record_stream(stream)  # their memory belongs to the copying stream
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
    """In a worker: a batch by its numbers. An error is sent as a value, or torch wraps it in a traceback."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, indices: Indices) -> Batch | DataError:
        try:
            src, tgt = self._samples.read(indices)
        except DataError as error:
            return error
        except Exception as error:
            problem = DataError(f"a worker of --workers raised {describe_error(error)}")
            problem.traceback_text = traceback_of(error)
            return problem
        return _as_tensor(src, self._samples.src), _as_tensor(tgt, self._samples.tgt)


def _as_tensor(array: NDArray[Any], info: ArrayInfo) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if info.bfloat16 else tensor


def _buffer(info: ArrayInfo, num: int, pinned: bool) -> Tensor:
    dtype = _as_tensor(np.empty(0, info.dtype), info).dtype
    return torch.empty((num, *info.shape), dtype=dtype, pin_memory=pinned)


def _as_array(tensor: Tensor) -> NDArray[Any]:
    bits = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    array: NDArray[Any] = bits.numpy()
    return array


def _leave_signals_to_the_rank(_: int) -> None:
    """In a worker: schedulers and terminals signal it too, and the rank goes on for a while to save.

    It ends with the rank, by the kernel's doing (prctl(2)).
    """
    for sig in SIGNALS:
        signal.signal(sig, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # multiprocessing's thread in a worker tells a rank's sudden end by a traceback of a lost connection.
    report = sys.excepthook
    sys.excepthook = lambda kind, *rest: None if issubclass(kind, OSError | EOFError) else report(kind, *rest)


def _started(loader: Iterable[T]) -> Iterator[T]:
    """The loader's iterator, its workers started.

    No variable may hold it: an error's traceback would keep it, and with it the workers, for which
    Python then waits at its end.
    """
    with _script_at_rest():
        return iter(loader)


@contextmanager
def _script_at_rest() -> Iterator[None]:
    """Inside, processes that start do not run the script again, as spawned ones do to find their functions.

    Those of a reader are in this package, and most scripts have no `if __name__ == "__main__":`.
    """
    script = sys.modules["__main__"].__dict__
    hidden: dict[str, Any] = {name: script.pop(name) for name in ("__file__", "__spec__") if name in script}
    script["__spec__"] = None
    try:
        yield
    finally:
        script.update(hidden)


def _prepare_for_workers() -> None:
    """Changes this process's environment, which its workers get.

    They pass tensors through sockets in TMPDIR, which PBS makes too long for a
    socket's name ("AF_UNIX path too long": https://github.com/python/cpython/issues/93852).
    And where a run ends by a signal, a helper of multiprocessing warns of what it cleans up.
    """
    if len(tempfile.gettempdir()) > _MAX_SOCKET_FOLDER:
        tempfile.tempdir = os.environ["TMPDIR"] = "/tmp"  # noqa: S108 - sockets in a private folder there
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
