"""Data classes of analyzed traces, per rank and per run. All times are in seconds."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

from ddp_hpc.trace.named_results import Curve, Kernel, LaunchStats, Memory, NamedEvent, Op, Region, SlowStep

REGIONS = ("data", "forward", "backward", "optimizer", "snapshot")
AFTER = "once, after the last step"
"""The place of a call after the last step on the host (without steps, after the last operator), while the
device is not finished."""
BEFORE = "once, before the device's first step"
"""The place of a call in which the host mostly waits for what the device runs before its first step."""
NO_CALL = "no call was recorded"
"""The reason of a wait of the host in which it calls neither operators nor the device's runtime."""


@dataclass(frozen=True)
class Times:
    """The times of a step's parts. Each moment is counted in one of `PARTS`, so that they sum to the step.

    The time of a region excludes waiting for communication. On a device, regions are the time in which the
    device computed, `data_s` is the time in which it waited while the host fetched data, and `idle_s` is
    all other time in which it did nothing.
    """

    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    snapshot_s: float = 0.0
    other_s: float = 0.0
    """Computation outside these regions."""
    comm_exposed_s: float = 0.0
    """Time in which a collective ran without any computation."""
    memcpy_s: float = 0.0
    """Time in which a device only copied or filled memory."""
    idle_s: float = 0.0
    """Time without any event in the trace."""
    comm_hidden_s: float = 0.0
    """Time in which a collective ran during computation; not part of the sum."""
    idle_data_s: float = 0.0
    """Time in which the device did nothing and the host fetched data; equals `data_s` on a device."""
    idle_snapshot_s: float = 0.0
    """Time in which the device did nothing and the host saved a snapshot; part of `snapshot_s`."""
    idle_host_s: float = 0.0
    """Time in which the device did nothing before the host began to launch the next kernel."""
    idle_launch_s: float = 0.0
    """Time in which the device did nothing during the call that launched the next kernel."""
    idle_kernel_s: float = 0.0
    """Time in which the device did nothing after this call, although the next kernel was launched."""
    idle_other_s: float = 0.0
    """Time in which the device did nothing before a kernel whose launch was not recorded."""

    @property
    def device_idle_s(self) -> float:
        """The time in which the device did nothing, which is the sum of `IDLE_CAUSES`."""
        return float(sum(getattr(self, cause) for cause in IDLE_CAUSES))

    @property
    def wall_s(self) -> float:
        """The time from the start of the step to its end."""
        return float(sum(getattr(self, part) for part in PARTS))

    @property
    def own_s(self) -> float:
        """The step without exposed communication, which includes the time of waiting for slower ranks."""
        return self.wall_s - self.comm_exposed_s


TIMES = tuple(each.name for each in fields(Times))
IDLE_CAUSES = tuple(name for name in TIMES if name.startswith("idle_") and name != "idle_s")
"""The fields of Times that divide the idle time of a device by cause."""
PARTS = tuple(name for name in TIMES if name != "comm_hidden_s" and name not in IDLE_CAUSES)
"""The fields of Times that sum to the step."""
COLUMNS = (*PARTS, "comm_hidden_s")
"""The fields of Times in the tables of mean steps."""
PART_NAMES = {
    "data_s": "waiting for data",
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
    "snapshot_s": "snapshots",
    "other_s": "computation not assigned to forward, backward or optimizer",
    "comm_exposed_s": "exposed communication",
    "memcpy_s": "memory copies",
    "idle_s": "idle",
    "comm_hidden_s": "hidden communication",
    "idle_host_s": "late launch",
    "idle_data_s": "waiting for data",
    "idle_snapshot_s": "snapshot",
    "idle_launch_s": "launch call",
    "idle_kernel_s": "kernel queued",
    "idle_other_s": "not recorded",
}
"""The names of these fields in sentences and charts."""


def present(times: Sequence[Times], names: Sequence[str]) -> list[str]:
    """Returns the names of the fields that are nonzero in at least one of `times`."""
    return [name for name in names if any(getattr(mean, name) for mean in times)]


@dataclass(frozen=True)
class Step:
    """One step of one rank, marked by the events of `RankTrace.steps_from`."""

    number: int
    start_s: float
    """Start on the common clock of the capture."""
    times: Times
    on_host: tuple[float, float] | None = None
    """The start and the end on the host, which can be ahead of the device, relative to `start_s`."""

    def limits_s(self, on_host: bool) -> tuple[float, float]:
        """Returns the start and the end, on the host if they are known for it."""
        begin_s, end_s = (on_host and self.on_host) or (0.0, self.times.wall_s)
        return self.start_s + begin_s, self.start_s + end_s

    @cached_property
    def end_s(self) -> float:
        """The end on the same clock."""
        return self.start_s + self.times.wall_s


@dataclass(frozen=True)
class Collective:
    """One call of a collective on one rank."""

    kind: str
    """The collective: all_reduce, all_gather, reduce_scatter, broadcast, ..."""
    group: str
    """The name of the process group; empty if the trace does not contain it."""
    num_ranks: int
    bytes: int
    """Size of the whole buffer as in nccl-tests: of all ranks for all_gather, reduce_scatter, all_to_all."""
    start_s: float
    dur_s: float
    step: int | None
    exposed_s: float = 0.0
    """The part of `dur_s` in which nothing was computed."""
    kernel: str = ""
    """The name of the kernel; empty on the host."""
    blocks: int = 0
    """The number of its blocks, which is at least that of the SMs that it occupies; 0 if unknown."""
    callers: str = ""
    """The annotations and operators around its launch, the outermost first."""
    queued_s: float = math.inf
    """The time from the start of the call that launched it to its start; infinite if unknown."""


@dataclass(frozen=True)
class HostTime:
    """What the host does while it waits for the device or the device for it, summed over a rank's steps."""

    name: str
    """The call of the device's runtime; empty outside of all calls."""
    operator: str
    """The innermost operator or annotation around it; empty outside of all of them."""
    num_calls: int
    total_s: float
    annotation: str = ""
    """For waits, the outermost operator and the innermost annotation around `operator`, AFTER or BEFORE."""
    reason: str = ""
    """For waits, the copy for which a call waits, or NO_CALL."""
    idle_s: float = 0.0
    """For waits, the time in which the device does nothing during or right after them, at most `total_s`."""
    comm_s: float = 0.0
    """For waits, the time in which a collective runs."""


@dataclass(frozen=True)
class Gap:
    """A time in which a device did nothing, and what the host did for the largest part of it."""

    step: int | None
    """None before the first step, and if no steps are marked."""
    after_s: float
    """The time from the start of the step, or of the first one, to the gap."""
    dur_s: float
    call: str
    """As in HostTime."""
    operator: str
    """The one in which the call takes longest."""
    kernel: str
    """The kernel at the end of the gap; empty at the end of the recording."""


@dataclass(frozen=True)
class PathPart:
    """The time that a step's critical path spends in one kernel, collective or kind of wait of a rank."""

    kind: str
    """One of `compute`, `memcpy`, `communication` and `wait`."""
    name: str
    """The kernel or collective, or the reason for waiting."""
    dur_s: float
    count: int
    """The number of kernels, collectives or waits."""
    rank: int = -1
    """The rank, or -1 in a PathLink, which belongs to one rank."""


@dataclass(frozen=True)
class PathLink:
    """The critical path on one rank, from the start of a collective or the end of the step backward."""

    previous: int
    """The index of the collective at whose end the link begins, or -1 at the start of the step."""
    parts: tuple[PathPart, ...]


@dataclass(frozen=True)
class PathLinks:
    """The links of one step of one rank, from which the critical path across ranks is assembled."""

    step: int
    end: PathLink
    """The link to the end of the step."""
    before: dict[int, PathLink]
    """The link to the start of each collective of the step, by its index in `RankTrace.collectives`."""


@dataclass(frozen=True)
class RankTrace:
    """The data of one rank's trace that the report needs."""

    rank: int
    world_size: int
    path: str
    host: str
    device: str
    """The device type used for computation: cpu, cuda or xpu."""
    steps: tuple[Step, ...]
    collectives: tuple[Collective, ...]
    ops: tuple[Op, ...]
    """Operators by self time, the longest first."""
    kernels: tuple[Kernel, ...]
    """Kernels and copies on the device, the longest first."""
    num_events: int
    """Those with a duration."""
    notes: tuple[str, ...]
    """The parts of this rank's trace that were skipped, with the reasons."""
    process: str = ""
    """Host and process ID of the recorded program; empty if the trace does not contain them."""
    device_name: str = ""
    """The product name of the device, such as `Tesla V100-SXM2-32GB`; empty if unknown."""
    num_sms: int = 0
    """The number of the SMs or compute units of a device; 0 if unknown."""
    memory_bytes: int = 0
    """The memory of a device; 0 if unknown."""
    is_cut_off: bool = False
    """Whether the file ends before the recording does, or its end could not be read."""
    busy: tuple[tuple[float, float, float], ...] = ()
    """Starts and ends of the times in which the device did something, between which short gaps may be closed,
    and the fraction without these gaps."""
    launches: LaunchStats | None = None
    """None if no launches or no activity of a device were recorded."""
    host_waits: tuple[HostTime, ...] = ()
    """What the host does while the device waits for a launch that has not begun."""
    gaps: tuple[Gap, ...] = ()
    """The longest ones."""
    startup: tuple[HostTime, ...] = ()
    """What the host does before the first step."""
    blocking_calls: tuple[HostTime, ...] = ()
    """The calls in which the host waits for the device or the driver."""
    path_links: PathLinks | None = None
    clock_ns: int = 0
    """The time to which the timestamps in the file are relative, on the common clock of the capture."""
    named: tuple[NamedEvent, ...] = ()
    memory: tuple[Memory, ...] = ()
    queue: Curve = ()
    regions: tuple[Region, ...] = ()
    """Those with the longest time of kernels first."""
    functions: tuple[Region, ...] = ()
    """Python functions other than those that only call another one."""
    threads: tuple[Region, ...] = ()
    """Threads of the host that run operators or annotations."""
    slow_steps: tuple[SlowStep, ...] = ()
    steps_from: str = "ProfilerStep#"
    """The beginning of the names of the events that mark the steps, which also can be `Optimizer.step`. If it
    is empty, there are none, and the only step is the whole recording."""
    host_s: dict[str, float] = field(default_factory=dict)
    """The time per step in which the host was in each region, whatever the device did."""
    metadata: tuple[tuple[str, str], ...] = ()
    """What the trace says about the job: terms and descriptions."""
    first_input: str = ""
    """The shape of the first layer's input, or why it is unknown; empty in captures without operators."""
    num_samples: int = 0
    """Its first dimension, if the first layer is called once per step with this shape; otherwise 0."""
    is_ring: bool = False
    """Whether its collectives are those of gloo, in groups of all ranks or of one."""

    @property
    def blocked_s(self) -> float:
        """The time per step in which the host is in blocking calls."""
        calls = [call for call in self.blocking_calls if call.annotation != AFTER and call.reason != NO_CALL]
        return sum(call.total_s for call in calls) / len(self.steps)

    @property
    def cut_off_s(self) -> float:
        """The time in which the device still ran earlier work after the host had begun the first step, which
        does not count; negative if the host began later.
        """
        return -(self.steps[0].on_host or (0.0, 0.0))[0]

    @property
    def host_own_s(self) -> float:
        """The mean step on the host without this time."""
        limits = [step.limits_s(True) for step in self.steps]
        return statistics.fmean(end_s - begin_s for begin_s, end_s in limits) - self.blocked_s

    def step_at(self, moment_s: float, on_host: bool = False) -> int | None:
        """Returns the number of the step that contains the moment, on the host or the device, or None.

        What the host does between its steps belongs to the one of which the device still runs kernels, and
        what it does before the first or after the last of them to none.
        """
        at = bisect_right(self.steps, moment_s, key=lambda step: step.limits_s(on_host)[0]) - 1
        is_inside = at >= 0 and moment_s < self.steps[at].limits_s(on_host)[1]
        if on_host and not is_inside and 0 <= at < len(self.steps) - 1:
            return self.step_at(moment_s)
        return self.steps[at].number if is_inside else None


@dataclass(frozen=True)
class CollectiveRow:
    """All calls of one kind and size of collective."""

    kind: str
    group: str
    num_ranks: int
    bytes: int
    num_calls: int
    """Number of calls per rank."""
    median_s: float
    """Median duration of a call, including waiting for late ranks."""
    total_s: float
    """Total duration per rank, averaged over the ranks."""
    exposed_s: float
    """The part of `total_s` in which nothing was computed. Collectives at the same time count both."""
    transfer_s: float | None
    """Median time from the start on the last rank to the end; None without the calls of all ranks."""
    transfers_s: float
    """The part of `total_s` that is not waiting for other ranks; 0 if `transfer_s` is unknown."""
    busbw_bytes_per_s: float | None
    """Bus bandwidth as defined by nccl-tests, computed from `transfer_s`; None if a part of it is unknown."""
    slowest_s: float
    slowest_rank: int
    slowest_step: int | None
    slowest_in: str = ""
    """The innermost annotation or operator around the launch of the slowest call."""
    blocks: int = 0
    """The largest number of blocks of a kernel; 0 if unknown."""


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    region: str
    """The region in which this rank is slower than the median of the others."""
    excess_s: float
    """The difference per step, without that of the start of the step."""
    share: float
    """The fraction of the mean step that is gained if it is as fast as the next slowest rank."""
    evidence: str
    """The explanation in one sentence."""
    before_s: float = 0.0
    """The time per step that is gained if all ranks begin the step at the same time."""
    waited_s: float = 0.0
    """The time per step for which the ranks wait for it, for any cause (mean)."""


@dataclass(frozen=True)
class SlowConnection:
    """The connection between two ranks on which the collectives wait."""

    sender: int
    receiver: int
    lag_s: float
    """How much later than the ranks other than the sender the receiver ends a collective (median)."""
    num_last: int
    """The number of collectives that the receiver ends last."""
    num_collectives: int
    """The number of large all_reduces."""


@dataclass(frozen=True)
class CriticalPath:
    """The chain of kernels, collectives and waits that determined the length of one step."""

    step: int
    begin_rank: int
    end_rank: int
    rows: tuple[PathPart, ...]
    """The path's times by rank, kind and name, the longest first."""

    @property
    def total_s(self) -> float:
        """The length of the path."""
        return sum(row.dur_s for row in self.rows)


@dataclass(frozen=True)
class Capture:
    """The traces of one run."""

    name: str
    world_size: int
    ranks: tuple[RankTrace, ...]
    missing: tuple[int, ...]
    mean: Times
    """Mean times of a step over ranks and steps."""
    rank_means: tuple[Times, ...]
    """Mean times of a step for each of `ranks`."""
    collectives: tuple[CollectiveRow, ...]
    """Collectives by total transfer time, the longest first."""
    straggler: Straggler | None
    slow_connection: SlowConnection | None
    findings: tuple[str, ...]
    """The main findings, one or two sentences each."""
    notes: tuple[str, ...]
    """Files, ranks and events that were skipped, and why."""
    warnings: tuple[str, ...] = ()
    """Warnings that a reader must see before the findings, such as the names of truncated files."""
    path: CriticalPath | None = None

    @property
    def has_steps(self) -> bool:
        """Whether the traces contain steps; otherwise, each is treated as one step."""
        return any(trace.steps_from for trace in self.ranks)

    @property
    def num_steps(self) -> int:
        """The number of steps of the rank with the most."""
        return max(len(trace.steps) for trace in self.ranks)

    def in_step_s(self, rank: int, step: int | None, after_s: float) -> float:
        """Returns the time from the start of a step on the rank that begins it first, as on the timeline, to
        a moment that is `after_s` after its start on a rank. None is the first step.
        """
        starts = self._starts[self._first[rank] if step is None else step]
        return after_s + starts[rank] - min(starts.values())

    @cached_property
    def _first(self) -> dict[int, int]:
        return {trace.rank: trace.steps[0].number for trace in self.ranks}

    @cached_property
    def _starts(self) -> dict[int, dict[int, float]]:
        """The starts of each step by its number and the rank."""
        starts: dict[int, dict[int, float]] = {}
        for trace in self.ranks:
            for step in trace.steps:
                starts.setdefault(step.number, {})[trace.rank] = step.start_s
        return starts

    @property
    def on_device(self) -> bool:
        """Whether the activity of a device other than the CPU was recorded."""
        return any(trace.busy for trace in self.ranks)

    @property
    def a_step(self) -> str:
        """The words for what `mean` is the mean of."""
        return "a step" if self.has_steps else "the recording"

    @property
    def per_step(self) -> str:
        """The words after a time or a number of events in `mean`."""
        return " per step" if self.has_steps else ""
