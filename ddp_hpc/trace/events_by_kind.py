"""Sorts the events of one rank's trace by kind, and keeps the fields that the report needs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ddp_hpc.trace import event_names as names
from ddp_hpc.trace.event_columns import Columns, Events, Numbers
from ddp_hpc.trace.named_results import Launch
from ddp_hpc.trace.parse_events import Event

_OLD_CATEGORIES = {
    "Operator": "cpu_op",
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Runtime": "cuda_runtime",
}
_MTIA_WAITS = ("event_wait", "event_record")
"""Events in the queues of an MTIA that do no work."""
_RUNTIMES = ("_runtime", "_driver")
"""The ends of the categories of calls that launch work: cuda_runtime, cuda_driver, xpu_runtime."""
_DEVICE_TYPES = {
    0: "cpu", 1: "cuda", 6: "hip", 12: "xpu", 13: "mps", 15: "hpu", 19: "mtia", 20: "privateuseone",
}  # fmt: skip
"""The values of c10::DeviceType, which torch writes as a number."""
_MOST_DIMS = 400
"""Limit of the characters of input shapes, and of their data types."""
_LEAST_FUNCTION_US = 20
"""The least duration of the calls of Python functions that are kept, since there can be millions."""
_MOST = 2**63
_MOST_THREADS = 1024
"""The largest number of threads of a block of any GPU."""


_Size = Annotated[int, msgspec.Meta(ge=0, le=_MOST - 1)]
_Change = Annotated[int, msgspec.Meta(ge=1 - _MOST, le=_MOST - 1)]


class _Memory(msgspec.Struct, gc=False):
    allocated_bytes: _Size = msgspec.field(name="Total Allocated", default=-1)
    reserved_bytes: _Size = msgspec.field(name="Total Reserved", default=0)
    change_bytes: _Change = msgspec.field(name="Bytes", default=0)
    device_type: int = msgspec.field(name="Device Type", default=0)
    device_id: int = msgspec.field(name="Device Id", default=-1)


class _Inputs(msgspec.Struct, gc=False):
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b""))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b""))
    dims_of_torch_1: msgspec.Raw = msgspec.field(name="Input dims", default=msgspec.Raw(b""))
    stack: msgspec.Raw = msgspec.field(name="Call stack", default=msgspec.Raw(b""))


class _Arguments(msgspec.Struct, gc=False):
    """The arguments of a collective: gloo writes the first two, NCCL the others."""

    dims: Any = msgspec.field(name="Input Dims", default=None)
    types: Any = msgspec.field(name="Input type", default=None)
    kind: str = msgspec.field(name="Collective name", default="")
    num_in: int = msgspec.field(name="In msg nelems", default=0)
    num_out: int = msgspec.field(name="Out msg nelems", default=0)
    num_ranks: int = msgspec.field(name="Group size", default=0)
    group: str = msgspec.field(name="Process Group Name", default="")
    dtype: str = ""


class _Link(msgspec.Struct, gc=False):
    """The argument that connects a kernel or a copy with the call on the host that launched it."""

    correlation: Annotated[int, msgspec.Meta(ge=-1, le=_MOST - 1)] = -1


class _Kernel(_Link):
    """What Kineto records of a kernel of CUDA. In other traces, most of it is unknown."""

    occupancy: float = msgspec.field(name="est. achieved occupancy %", default=-1)
    shared_bytes: _Size = msgspec.field(name="shared memory", default=0)
    registers: _Size = msgspec.field(name="registers per thread", default=0)
    bytes: _Size = 0
    grid: tuple[_Size, ...] = ()
    block: tuple[_Size, ...] = ()

    def __post_init__(self) -> None:
        # Kineto assumes that a block can have at most 48 KiB (computeOccupancyMetrics), and writes 0.
        if self.shared_bytes > 48 << 10:
            self.occupancy = -1


_Args = TypeVar("_Args", _Link, _Kernel, _Memory, _Arguments, _Inputs)


class Message(NamedTuple):
    """What a collective does."""

    kind: str
    group: str
    num_ranks: int
    """Number of ranks in the group, or 0 if unknown."""
    bytes: int


@dataclass(frozen=True)
class Recording:
    """The events of a rank by kind."""

    base_us: float
    """The start of the first event."""
    zero_s: float
    """The same moment as a time of day, to which all times are relative."""
    host: Events
    """Operators and annotations, with their indices in `messages`, or -1, and in `shapes`."""
    modules: Events
    """The calls of modules (`with_modules` or `with_stack`), with the thread numbers of `host`."""
    functions: Events
    """The calls of other Python functions (`with_stack`) that are not short, with the same thread numbers."""
    launches: Events
    """Calls of the device's runtime or driver, with correlation IDs and the thread numbers of `host`."""
    device: Events
    """Kernels and copies, with correlation IDs, the `bytes` of copies, `message` as above, indices in
    `configs`, and Kineto's estimates of the `occupancy`, or -1."""
    memory: Events
    """Allocations, with `allocated_bytes` and `reserved_bytes` after them and the thread numbers of `host`.
    Their names are those of the devices."""
    messages: Sequence[Message]
    configs: Sequence[Launch]
    shapes: Sequence[str]
    """Shapes and data types of inputs; the first is empty."""
    has_stacks: bool
    """Whether the calls of Python functions were recorded."""
    has_stacks_of_operators: bool
    """Whether operators have call stacks, as in traces of torch 1."""
    num_dropped: int
    """The number of events that were not kept."""

    @cached_property
    def host_and_modules(self) -> Events:
        """The events of `host`, and after them those of `modules`, without fields."""
        return self.host.joined(self.modules)

    @property
    def num_events(self) -> int:
        """The number of events with a duration."""
        return sum(map(len, (self.host_and_modules, self.functions, self.launches, self.device)))

    @property
    def is_collective(self) -> npt.NDArray[np.bool_]:
        """Whether each event of the device is a collective."""
        mask: npt.NDArray[np.bool_] = self.device.fields["message"] >= 0
        return mask

    @property
    def lacks_device(self) -> bool:
        """Whether the host launched work on a device whose activity was not recorded."""
        return len(self.launches) > 0 and not len(self.device)


class Collector:
    """Collects the events of a rank."""

    def __init__(self) -> None:
        self._threads = threads = Numbers[tuple[Any, Any]]()
        self.host = Columns(threads, message="i", shapes="i")
        self.modules = Columns(threads)
        self.functions = Columns(threads)
        self.launches = Columns(threads, correlation="q")
        self.device = Columns(Numbers(), correlation="q", bytes="q", message="i", config="i", occupancy="d")
        self.memory = Columns(threads, allocated_bytes="q", reserved_bytes="q", change_bytes="q")
        self.messages: Numbers[Message] = Numbers()
        self.configs: Numbers[Launch] = Numbers()
        self.shapes = Numbers({"": 0})
        self.has_stacks = self.has_stacks_of_operators = False

    def add(self, events: list[Event], world_size: int) -> None:
        """Adds events of a program of `world_size` ranks, or 0 if this is unknown."""
        of: defaultdict[str, list[Event]] = defaultdict(list)
        for event in events:
            of[event.cat].append(event)
        for old, new in _OLD_CATEGORIES.items():
            for event in of.pop(old, ()):
                event.cat = new
                of[new].append(event)
        # Annotations come first, so that they enclose operators of the same duration.
        host = [event for event in of["user_annotation"] + of["cpu_op"] if event.ph == "X"]
        annotated = [event.cat != "cpu_op" and names.annotated_kind(event.name) for event in host]
        inputs = [_decoded(_Inputs, event) for event in host]
        texts = [
            ((bytes(one.dims) or bytes(one.dims_of_torch_1))[:_MOST_DIMS], bytes(one.types)[:_MOST_DIMS])
            for one in inputs
        ]
        shapes = [self.shapes[names.shapes_of(*one)] for one in texts]
        modules = [event for event in of["python_function"] if event.name.startswith("nn.Module: ")]
        self.modules.add(modules)
        self.functions.add([
            event
            for event in of["python_function"]
            if event.dur >= _LEAST_FUNCTION_US and not event.name.startswith("nn.Module: ")
        ])  # fmt: skip
        self.has_stacks |= len(modules) < len(of["python_function"])
        self.has_stacks_of_operators |= any(bytes(one.stack) for one in inputs)
        self.host.add(host, message=self._messages(host, annotated, world_size), shapes=shapes)
        for category in of:
            if category.endswith(_RUNTIMES):
                links = [_decoded(_Link, event) for event in of[category]]
                self.launches.add(of[category], correlation=[link.correlation for link in links])
        for event in of.pop("mtia_ccp_events", ()):
            if event.name not in _MTIA_WAITS:
                event.cat = "gpu_memcpy" if event.name == "dma_request" else "kernel"
                of[event.cat].append(event)
        self._add_device(of["kernel"] + of["gpu_memcpy"] + of["gpu_memset"], world_size)
        instants = of["cpu_instant_event"] + of[""]  # torch 1.9 writes no category
        self._add_memory([event for event in instants if event.name == "[memory]"])

    def _add_device(self, events: list[Event], world_size: int) -> None:
        kernels = [_decoded(_Kernel, event) for event in events]
        fields = {
            name: [getattr(kernel, name) for kernel in kernels]
            for name in ("correlation", "bytes", "occupancy")
        }
        kinds = [event.cat == "kernel" and names.kernel_kind(event.name) for event in events]
        launches = (Launch(one.grid, one.block, one.registers, one.shared_bytes) for one in kernels)
        fields["config"] = [self.configs[launch] for launch in launches]
        fields["message"] = self._messages(events, kinds, world_size)
        self.device.add(events, **fields)

    def _messages(self, events: list[Event], kinds: Sequence[Any], world_size: int) -> list[int]:
        """Returns the numbers of the messages of events that are collectives; -1 for others."""
        return [
            self.messages[_message(event, kind, world_size)] if kind else -1
            for event, kind in zip(events, kinds, strict=True)
        ]

    def _add_memory(self, events: list[Event]) -> None:
        decoded = [(event, _decoded(_Memory, event)) for event in events]
        known = [one for one in decoded if one[1].allocated_bytes >= 0 or one[1].change_bytes]
        for event, memory in known:
            event.name = _DEVICE_TYPES.get(memory.device_type, f"device type {memory.device_type}")
            if memory.device_id >= 0 and event.name != "cpu":
                event.name += f":{memory.device_id}"
            if (event.pid, str(event.tid)) in self._threads:  # torch 1.9 has text for operators only
                event.tid = str(event.tid)
        self.memory.add(
            [event for event, _ in known],
            allocated_bytes=[memory.allocated_bytes for _, memory in known],
            reserved_bytes=[memory.reserved_bytes for _, memory in known],
            change_bytes=[memory.change_bytes for _, memory in known],
        )

    def recording(self, clock_ns: int) -> Recording:
        """Returns the events. `clock_ns` is the time of day to which their timestamps are relative."""
        firsts = [columns.first_us() for columns in (self.host, self.device)]
        base_us = min((first for first in firsts if first is not None), default=0.0)
        parts = {name: columns for name, columns in vars(self).items() if isinstance(columns, Columns)}
        configs = tuple(self.configs)
        # Small blocks could be of any profiler, so one of the whole trace decides.
        if any(math.prod(launch.block) > _MOST_THREADS for launch in configs):
            configs = tuple(map(_exchanged, configs))
        return Recording(
            base_us=base_us,
            zero_s=clock_ns * 1e-9 + base_us * 1e-6,
            messages=tuple(self.messages),
            configs=configs,
            shapes=tuple(self.shapes),
            has_stacks=self.has_stacks,
            has_stacks_of_operators=self.has_stacks_of_operators,
            num_dropped=sum(columns.num_dropped for columns in parts.values()),
            **{name: columns.events(base_us) for name, columns in parts.items()},
        )


def _exchanged(launch: Launch) -> Launch:
    """Returns a launch of rocprofiler-sdk, in whose traces `grid` is the block and `block` all threads."""
    pairs = zip(launch.block, launch.grid, strict=False)
    blocks = tuple(-(-threads // max(1, of_block)) for threads, of_block in pairs)
    return launch._replace(grid=blocks, block=launch.grid)


def _decoded(kind: type[_Args], event: Event) -> _Args:
    """Returns the arguments of an event, with the defaults if they cannot be read."""
    try:
        return msgspec.json.decode(event.args, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return kind()


def _message(event: Event, kind: str, world_size: int) -> Message:
    arguments = _decoded(_Arguments, event)
    kind = names.kind_of(arguments.kind) if arguments.kind else kind
    num_ranks = arguments.num_ranks or world_size
    if arguments.dtype:
        num_bytes = max(arguments.num_in, arguments.num_out) * names.element_bytes(arguments.dtype)
    else:
        num_bytes = _bytes_in(arguments)
        if kind == "all_gather":  # gloo's annotation contains the size of this rank's input only
            num_bytes *= max(1, num_ranks)
    if not 0 <= num_bytes < _MOST or not 0 <= num_ranks < _MOST:
        num_bytes = num_ranks = 0  # the size is invalid, because no buffer can be this large
    return Message(kind, arguments.group, num_ranks, num_bytes)


def _bytes_in(arguments: _Arguments) -> int:
    """Returns the total size of the input tensors, given as `[[4, 3], [2]]` and `["float", "float"]`."""
    if not isinstance(arguments.dims, list) or not isinstance(arguments.types, list):
        return 0
    total = 0
    for dims, dtype in zip(arguments.dims, arguments.types, strict=False):
        if isinstance(dtype, str) and isinstance(dims, list) and all(isinstance(dim, int) for dim in dims):
            total += math.prod(dims) * names.element_bytes(dtype) if dims else 0
    return total
