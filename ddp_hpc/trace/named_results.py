"""What the trace of a rank contains by name: operators, annotations, kernels, memory; times in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

ANNOTATION, PYTHON, OPERATOR = "annotation", "Python call", "operator"
CALL, BLOCKING = "runtime call", "blocking call"

Curve: TypeAlias = tuple[tuple[float, ...], ...]
"""Moments on the common clock of the capture in seconds, and values that begin at each of them."""


@dataclass(frozen=True)
class Op:
    """An operator, summed over its calls in the steps of a rank."""

    name: str
    num_calls: int
    total_s: float
    self_s: float
    """Time without the operators that it called, as in torch's key averages."""
    device_s: float = 0.0
    """Time of the kernels that it and the operators that it called launched."""


@dataclass(frozen=True)
class Region:
    """An annotation or a module, summed over its calls in the steps of a rank, with all that is inside it and
    what autograd's threads do while its thread waits for them; or a Python function, or a thread of the host.
    """

    name: str
    """Modules of a class that are called at the same depth, such as Linear_0 and Linear_1, have its name."""
    num_calls: int
    total_s: float
    """Time on the host."""
    num_kernels: int = 0
    device_s: float = 0.0
    """Time of its kernels and copies without collectives."""
    comm_s: float = 0.0
    """Time of its collectives on the device."""
    idle_s: float = 0.0
    """Time in which the device did nothing before one of its kernels or copies."""
    depth: int = 0
    """The number of regions around modules."""
    num: int = 0
    """The number of these modules; 0 for other regions."""
    longest_s: float = 0.0
    """The time of the module with the longest time on the host, per step."""
    longest_at: str = ""
    """This module, whose number is that among all modules of the class; of a thread, what it mostly runs."""


@dataclass(frozen=True)
class SlowStep:
    """What a slow step of a rank has more of than the mean of its other steps."""

    step: int
    dur_s: float
    excess_s: float
    part: str
    """The field of Times with the largest difference."""
    part_s: float
    call: str
    """The operator, without what it calls, or call of the runtime with the largest difference."""
    call_s: float
    kernel: str = ""
    kernel_s: float = 0.0


class Launch(NamedTuple):
    """How a kernel was launched."""

    grid: tuple[int, ...] = ()
    """The number of blocks in each dimension; empty if unknown."""
    block: tuple[int, ...] = ()
    """The number of threads in each dimension."""
    registers: int = 0
    """Per thread; 0 if unknown."""
    shared_bytes: int = 0
    """Per block."""


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy that was launched in an operator, summed over those that begin in a rank's steps."""

    name: str
    operator: str
    """The innermost operator or annotation around the launch; empty if unknown."""
    kind: str
    """What the kernel does, such as `matrix products`, or its collective."""
    num_calls: int
    total_s: float
    shortest_s: float = 0.0
    samples_s: tuple[float, ...] = ()
    """Some of the durations, evenly distributed over all of them in ascending order."""
    longest_s: float = 0.0
    longest_step: int | None = None
    """The number of the step in which the longest call begins; None outside of all steps."""
    longest_after_s: float = 0.0
    """The time from the start of this step on the rank."""
    graph_launch: str = ""
    """The call that launches the graph that contains the kernel; empty outside of graphs."""
    stream: str = ""
    is_copy: bool = False
    bytes: int = 0
    """What copies move in all calls; 0 if unknown."""
    running_s: float = 0.0
    """The part of the time of copies in which kernels run, and of that of kernels in which collectives do."""
    shapes: str = ""
    """The shapes of the operator's inputs; empty if they were not recorded."""
    launch: Launch | None = None
    tensor_cores: float | None = None
    """1 if it uses Tensor Cores or AMD's matrix cores, and 0 if not; None if its name does not show it."""
    occupancy: float | None = None
    """Kineto's estimate of the achieved occupancy in percent: the mean, weighted by the durations."""
    region: str = ""
    """The region of REGIONS in which it was launched; empty outside of all regions."""


class NamedEvent(NamedTuple):
    """A region, an operator, an annotation, a call or a kernel on the timeline of a rank."""

    kind: str
    """One of REGIONS, ANNOTATION, PYTHON, OPERATOR, CALL, BLOCKING, or the kind of the kernel."""
    name: str
    start_s: float
    dur_s: float
    callers: str = ""
    """The annotations and operators around a call, or around the launch of a kernel, the outermost first."""
    launched_s: float = math.inf
    """The start of the call that launched a kernel; infinite if unknown."""
    details: str = ""
    """The grid, the registers and so on of a kernel, and the inputs of an operator, as far as known."""
    share: float = 1.0
    """The fraction of this time in which the device is busy."""


@dataclass(frozen=True)
class LaunchStats:
    """How the host launched the work of a device, per step of one rank. A copy counts as a kernel."""

    num_calls: float
    """Calls that launched kernels; a call that launches a CUDA graph counts once."""
    num_kernels: float
    num_short: float
    """Kernels that are shorter than the call that launched them."""
    num_late: float
    """Kernels that the host launched only after the device had finished everything before."""
    call_s: float
    """Median duration of a call."""
    delay_s: float
    """Median time from the end of a call to the start of its first kernel, at least 0."""
    num_graphs: float = 0.0
    """Calls that launch CUDA graphs."""
    num_in_graphs: float = 0.0
    """Kernels in these graphs."""
    share_of_graphs: float = 0.0
    """The fraction of the time of all kernels that those in graphs take."""
    outside_graphs: str = ""
    """The kernel that takes longest outside of graphs, and its time."""
    outside_graphs_s: float = 0.0
    behind_s: float = 0.0
    """The time from the launch of the first kernel to its start."""
    kernel_s: float = 0.0
    """Median duration of a kernel."""
    queue_median: float = 0.0
    """Median over time of the number of kernels whose launch call has begun, and that have not started."""
    queue_empty: float = 0.0
    """The fraction of the time in which there are no such kernels."""


@dataclass(frozen=True)
class Memory:
    """The memory of a device that torch's allocator used while it was recorded."""

    device: str
    """The device, such as `cuda:0`."""
    allocated_bytes: int
    """The peak, like `reserved_bytes`."""
    reserved_bytes: int
    step: int | None
    """The number of the step in which `allocated_bytes` was reached, or None outside of all steps."""
    callers: str
    """The annotations and operators in which this happened, from the outermost to the innermost."""
    curve: Curve
    """`allocated_bytes` and `reserved_bytes` over time."""
    is_change: bool = False
    """Whether the bytes are those since the start of the recording, without what was allocated before."""
