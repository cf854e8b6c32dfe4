"""The values of a safetensors file in host memory, into which a save copies the tensors of the device.

The layout (https://huggingface.co/docs/safetensors) is eight bytes with the length of the header, the header
as JSON, and the tensors, whose bytes are written to the file unchanged. So the training waits only for one
copy.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ddp_hpc.base.data_file_layout import SAFETENSORS_DTYPES

Tensors: TypeAlias = Mapping[str, Tensor]
Specs: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

# Older versions of safetensors cannot read the other unsigned types.
DTYPES = {
    getattr(torch, name): code
    for name, code in SAFETENSORS_DTYPES.items()
    if code not in ("U16", "U32", "U64")
}
# The largest item size, to which tensors are aligned.
_ALIGNED_BYTES = 8
# torch rounds pinned memory up to powers of two, so a buffer is allocated in parts whose sizes are such
# powers.
_MOST_BYTES, _LEAST_BYTES = 2**26, 2**20
# The size of the tensors whose copies are started together.
_AT_ONCE_BYTES = 2**28


@dataclass(frozen=True)
class Place:
    """The place of a shard in the whole tensor."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Stream:
    """Named tensors that are produced one after another, so that they do not have to be in memory at the same
    time.
    """

    specs: Specs
    tensors: Iterable[tuple[str, Tensor]]
    is_pinned: bool = False
    """Whether pinned memory makes the copies from their device faster."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """The places of the tensors that are shards."""


def specs_of(tensors: Tensors) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns shape and type of each tensor; for a sharded tensor, those of the whole tensor."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


class FileBuffer:
    """The bytes after the header of a safetensors file with tensors of these names, types and shapes.

    The bytes are stored in `parts`, a list of 1-d uint8 tensors, in pinned memory if requested.

    Raises:
        TypeError: on construction, for a data type that safetensors does not support.
    """

    def __init__(self, specs: Specs, *, is_pinned: bool = False) -> None:
        self.specs = dict(specs)
        # `_begins`: the position of each tensor's first byte after the header.
        _, self._begins = file_layout(specs)
        self.parts = _allocate(num_bytes_of(specs), is_pinned)
        self._streams: dict[torch.device, Any] = {}
        self._copies: list[tuple[torch.device, Any]] = []
        self._starts = [0]
        for part in self.parts:
            self._starts.append(self._starts[-1] + part.numel())
        # Creating these views takes longer than starting the copies.
        self._views = {name: self._places(self._begins[name], *specs[name]) for name in specs}

    @property
    def num_bytes(self) -> int:
        """The size of the values in bytes."""
        return self._starts[-1]

    def matches(self, specs: Specs) -> bool:
        """Returns whether the tensors have the names, types and shapes of this buffer."""
        return self.specs == dict(specs)

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Starts copying the values of all tensors; call `wait` before reading the bytes.

        A device copies on a stream of its own. Its work that is queued later waits for the copies, because it
        may change the tensors, or reuse the memory of temporary ones. The host does not wait.
        """
        missing = set(self.specs)
        # If whole tensors are gathered one after another, only some of them are in memory at the same time.
        waiting: dict[torch.device, dict[str, Tensor]] = {}
        num_bytes = 0
        for name, tensor in tensors:
            missing.discard(name)
            values = tensor.detach()
            waiting.setdefault(tensor.device, {})[name] = values
            num_bytes += values.nbytes
            if num_bytes >= _AT_ONCE_BYTES:
                self._copy(waiting)
                num_bytes = 0
        assert not missing, missing
        self._copy(waiting)
        for device, stream in self._streams.items():
            self._copies.append((device, stream.record_event()))

    def wait(self) -> None:
        """Waits until the copies that `fill` has started are complete. Can be called from any thread."""
        while self._copies:
            device, copied = self._copies.pop()
            # The current device of a new thread is the first GPU. Without this context manager, waiting would
            # allocate a CUDA context there, about 500 MiB per rank of the node
            # (https://github.com/meta-pytorch/torchcomms/pull/777).
            with torch.get_device_module(device).device(device):
                copied.synchronize()

    def _stream_of(self, device: torch.device) -> Any:
        """Returns the stream on which all saves from a device are copied.

        torch takes new streams from a pool of 32 in turn (c10/cuda/CUDAStream.h), so a new stream for each
        save could be the stream of the training.
        """
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        return self._streams[device]

    def _copy(self, waiting: dict[torch.device, dict[str, Tensor]]) -> None:
        """Starts copying these tensors, and removes them from `waiting`."""
        while waiting:
            device, values = waiting.popitem()
            if device.type == "cpu":
                self._put(self._with_places(values))
                continue
            module, stream = torch.get_device_module(device), self._stream_of(device)
            stream.wait_stream(module.current_stream(device))
            with module.stream(stream):
                self._put(self._with_places(values))
            module.current_stream(device).wait_stream(stream)

    def _with_places(self, values: Mapping[str, Tensor]) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Yields each tensor with its place in the file; scalars that follow each other there are stacked.

        Adam has a step count for each parameter, and a copy of four bytes takes as long as one of many more.
        """
        scalars = {self._begins[name]: value for name, value in values.items() if not value.dim()}
        for begin, several in _runs(scalars):
            yield self._places(begin, (len(several),), several[0].dtype), torch.stack(several)
        for name, value in values.items():
            if value.dim():
                yield self._views[name], value

    def _put(self, copies: Iterable[tuple[list[Tensor], Tensor]]) -> None:
        """Starts copying each tensor to its place, with one call for all of them."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for place, values in copies:
            targets += place
            if len(place) == 1:
                sources.append(values)
            else:
                sources += torch.split(values.reshape(-1), [len(view) for view in place])
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def _places(self, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Returns the bytes from `begin` on as one tensor, or as several flat ones in different parts."""
        end = begin + prod(shape) * dtype.itemsize
        at, views = begin, []
        while at < end:
            number = bisect_right(self._starts, at) - 1
            start, stop = self._starts[number], min(end, self._starts[number + 1])
            views.append(self.parts[number][at - start : stop - start].view(dtype))
            at = stop
        return [views[0].view(shape)] if len(views) == 1 else views


def _runs(scalars: Mapping[int, Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Yields the scalars in runs of one data type that follow each other, with the position of the first."""
    run: list[Tensor] = []
    begin = 0
    for at, value in sorted(scalars.items()):
        if run and (run[0].dtype, begin + len(run) * value.itemsize) != (value.dtype, at):
            yield begin, run
            run = []
        if not run:
            begin = at
        run.append(value)
    if run:
        yield begin, run


def num_bytes_of(specs: Specs) -> int:
    """Returns the number of bytes of the values of tensors with these shapes and types."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in specs.values())


def file_layout(specs: Specs, metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """Returns the first bytes of a safetensors file, and the position of each tensor after them.

    The tensors follow each other in the order of the positions.

    Raises:
        TypeError: safetensors does not support a data type.
    """
    # Largest items first, so that all are aligned without gaps, which the format forbids.
    names = sorted(specs, key=lambda name: (-specs[name][1].itemsize, name))
    header: dict[str, dict[str, Any]] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in names:
        shape, dtype = specs[name]
        if dtype not in DTYPES:
            raise TypeError(f"{name} has the type {dtype}, which safetensors does not support")
        end = offset + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    first = struct.pack("<Q", len(text)) + text
    return first, {name: header[name]["data_offsets"][0] for name in names}


def _allocate(num_bytes: int, is_pinned: bool) -> list[Tensor]:
    """Allocates `num_bytes` as tensors whose sizes are powers of two, except for the last one."""
    parts, left = [], num_bytes
    while left > 0:
        size = min(_MOST_BYTES, max(_LEAST_BYTES, 2 ** (left.bit_length() - 1)))
        parts.append(torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)[:left])
        left -= size
    return parts
