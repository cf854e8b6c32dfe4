"""What is kept of a trace's events while they go by."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ddp_hpc.trace import names
from ddp_hpc.trace.columns import Columns
from ddp_hpc.trace.events import Event

_OLD_CATEGORIES = {"Operator": "cpu_op", "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}
_DEVICE_TYPES = {0: "cpu", 1: "cuda", 12: "xpu", 13: "mps", 20: "privateuseone"}
"""c10::DeviceType, which torch writes as a number."""
_MOST_CALLS = 1_000_000


class _Memory(msgspec.Struct, gc=False):
    allocated: int = msgspec.field(name="Total Allocated", default=0)
    device_type: int = msgspec.field(name="Device Type", default=0)
    device_id: int = msgspec.field(name="Device Id", default=-1)


class _Message(msgspec.Struct, gc=False):
    """Of a collective: the first two are gloo's, the others NCCL's."""

    dims: Any = msgspec.field(name="Input Dims", default=None)
    types: Any = msgspec.field(name="Input type", default=None)
    kind: str = msgspec.field(name="Collective name", default="")
    num_in: int = msgspec.field(name="In msg nelems", default=0)
    num_out: int = msgspec.field(name="Out msg nelems", default=0)
    num_ranks: int = msgspec.field(name="Group size", default=0)
    group: str = msgspec.field(name="Process Group Name", default="")
    dtype: str = ""


_MEMORY = msgspec.json.Decoder(_Memory)
_MESSAGE = msgspec.json.Decoder(_Message)


@dataclass(frozen=True)
class Call:
    """A collective as it stands in the trace; times in microseconds."""

    kind: str
    group: str
    num_ranks: int
    """0: not told."""
    bytes: int
    start_us: float
    dur_us: float
    thread: tuple[Any, Any]
    on_device: bool


@dataclass
class Gathered:
    """The events of a rank, sorted out."""

    host: Columns = field(default_factory=Columns)
    """Operators and annotations."""
    device: Columns = field(default_factory=Columns)
    """Kernels and copies."""
    device_regions: Columns = field(default_factory=Columns)
    """Annotations as the device saw them."""
    calls: list[Call] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    num_calls_dropped: int = 0


COLLECTIVE = "collective"
"""The category that kernels of collectives get in `Gathered.device`."""


def gather(events: list[Event], gathered: Gathered, world_size: int) -> None:
    """Sorts some more events into `gathered`."""
    of: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        of[event.cat].append(event)
    for old, new in _OLD_CATEGORIES.items():
        for event in of.pop(old, ()):
            event.cat = new
            of[new].append(event)
    host = (
        of["user_annotation"] + of["cpu_op"]
    )  # of two that last as long, the annotation encloses the operator
    gathered.host.add([event for event in host if event.ph == "X"])
    gathered.device_regions.add(of["gpu_user_annotation"])
    calls = [
        _call(event, kind, world_size, on_device=False)
        for event in of["user_annotation"]
        if (kind := names.annotated_kind(event.name))
    ]
    for event in of["kernel"]:
        if kind := names.kernel_kind(event.name):
            event.cat = COLLECTIVE
            calls.append(_call(event, kind, world_size, on_device=True))
    gathered.device.add(of["kernel"] + of["gpu_memcpy"] + of["gpu_memset"])
    room = max(0, _MOST_CALLS - len(gathered.calls))
    gathered.num_calls_dropped += max(0, len(calls) - room)
    gathered.calls += calls[:room]
    for event in of["cpu_instant_event"]:
        if event.name == "[memory]":
            _count_memory(event, gathered.peak_bytes)


def _count_memory(event: Event, peak_bytes: dict[str, int]) -> None:
    try:
        memory = _MEMORY.decode(event.args)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    device = _DEVICE_TYPES.get(memory.device_type, f"device type {memory.device_type}")
    if memory.device_id >= 0 and device != "cpu":
        device = f"{device}:{memory.device_id}"
    peak_bytes[device] = max(peak_bytes.get(device, 0), memory.allocated)


def _call(event: Event, kind: str, world_size: int, on_device: bool) -> Call:
    try:
        message = _MESSAGE.decode(event.args)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = _Message()
    kind = names.kind_of(message.kind) if message.kind else kind
    num_ranks = message.num_ranks or world_size
    if message.dtype:
        num_bytes = max(message.num_in, message.num_out) * names.element_bytes(message.dtype)
    else:
        num_bytes = _bytes_in(message)
        if kind == "all_gather":  # gloo's annotation has what this rank gives
            num_bytes *= max(1, num_ranks)
    return Call(
        kind, message.group, num_ranks, num_bytes, event.ts, event.dur, (event.pid, event.tid), on_device
    )


def _bytes_in(message: _Message) -> int:
    """Of all tensors that went in: `[[4, 3], [2]]` and `["float", "float"]`."""
    if not isinstance(message.dims, list) or not isinstance(message.types, list):
        return 0
    total = 0
    for dims, dtype in zip(message.dims, message.types, strict=False):
        if isinstance(dtype, str) and isinstance(dims, list) and all(isinstance(dim, int) for dim in dims):
            total += math.prod(dims) * names.element_bytes(dtype) if dims else 0
    return total
