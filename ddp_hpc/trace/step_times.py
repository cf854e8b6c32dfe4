"""Divides the time of each step of a rank into its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ddp_hpc.trace import event_names as names
from ddp_hpc.trace.analysis_results import REGIONS, TIMES, Times
from ddp_hpc.trace.device_activity import (
    Gaps,
    Launches,
    find_launches,
    idle_gaps,
    is_inside,
    step_windows,
)
from ddp_hpc.trace.event_columns import Columns
from ddp_hpc.trace.events_by_kind import COLLECTIVE, RankEvents
from ddp_hpc.trace.intervals import NO_INTERVALS, Intervals, Longs, cover, index_at, is_within, union

# Inner regions come first, because data loading or a backward pass may be nested in a forward region.
_INNER_FIRST = ("data", "snapshot", "optimizer", "backward", "forward")

# Lightning calls the forward and the backward pass in a closure of Optimizer.step.
_IN_CLOSURE = ("backward", "forward")

_MOST_DIGITS = 18
_LEAST_UPDATES = 3
"""The number of calls of an optimizer from which on they separate steps."""

# If the device is idle while the host is in one of these regions, the region is the cause.
_WAITED_FOR = ("data", "snapshot")

# The parts of a step that contain the idle times of a device.
_IDLE_PARTS = {
    "data_s": ("idle_data_s",),
    "snapshot_s": ("idle_snapshot_s",),
    "idle_s": ("idle_host_s", "idle_launch_s", "idle_kernel_s", "idle_other_s"),
}

_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class DeviceActivity:
    """The events of a device, with times in nanoseconds relative to the first event."""

    events: Intervals
    busy: Intervals
    """The union of the events."""
    gaps: Gaps
    launches: Launches
    region: npt.NDArray[np.object_]
    """The region of REGIONS in which each event was launched; empty outside of all regions."""
    waited_for: dict[str, Intervals]
    """The times in which the host fetched data or saved a snapshot."""


@dataclass(frozen=True)
class Steps:
    """The steps of a rank, with times in nanoseconds relative to the first event."""

    numbers: tuple[int, ...]
    starts: Longs
    ends: Longs
    times: tuple[Times, ...]
    regions: dict[str, Intervals]
    """Sorted intervals. Those of a device last as long as it runs only kernels of one region. The intervals
    of `data` are those of the host."""
    separator: str
    """The value of RankTrace.steps_from."""
    on_host: Intervals
    """The starts and ends of the steps on the host. On a device, a step can begin and end later."""
    outside_share: float = 0.0
    """The part of the device's busy time that is before the first or after the last step."""
    unlinked_share: float = 0.0
    """The part of the kernels whose launch was not recorded, so that they belong to no region."""
    device: DeviceActivity | None = None
    """None if no activity of a device was recorded."""

    def step_of(self, moment_ns: int) -> int | None:
        """Returns the number of the step that contains the moment, or None."""
        at = int(index_at((self.starts, self.ends), np.array([moment_ns]))[0])
        return self.numbers[at] if at >= 0 else None

    def contain(self, moments: Longs, *, on_host: bool = False) -> _Mask:
        """Returns for each moment whether it is in a step. Without marked steps, all moments are."""
        windows = self.on_host if on_host else (self.starts, self.ends)
        return np.full(len(moments), not self.separator) | (index_at(windows, moments) >= 0)

    @property
    def loading_s(self) -> float:
        """The time per step in which the host fetched data."""
        moments, inside = cover({"step": self.on_host, "data": self.regions["data"]})
        return (
            float(np.diff(moments)[inside["step"] & inside["data"]].sum()) * 1e-9 / (len(self.numbers) or 1)
        )


class _Named:
    """Columns with masks by name, in which a condition is evaluated once per name and not per event."""

    def __init__(self, columns: Columns, base_us: float) -> None:
        self.names = list(columns.names)
        self.name = columns.name
        self.thread = columns.thread
        self.starts = columns.start_ns(base_us)
        self.ends = self.starts + columns.dur_ns()

    def where(self, condition: Callable[[str, str], object]) -> _Mask:
        """Returns a mask of the events whose category and name satisfy the condition."""
        return np.array([bool(condition(*name)) for name in self.names], bool)[self.name]

    @cached_property
    def region(self) -> npt.NDArray[np.object_]:
        """The region in REGIONS that each event's name denotes; empty for other names."""
        regions = ["backward" if names.is_node(*pair) else names.region_of(pair[1]) for pair in self.names]
        return np.array([region or "" for region in regions], object)[self.name]

    def intervals(self, mask: _Mask) -> Intervals:
        return self.starts[mask], self.ends[mask]


def measure(rank_events: RankEvents, base_us: float) -> Steps:
    """Returns the steps of a rank with the times of their parts."""
    host = _Named(rank_events.host, base_us)
    device = _Named(rank_events.device, base_us)
    numbers, steps, separator = _windows(host, device)
    is_comm = host.where(lambda category, name: category != "cpu_op" and names.runs_on_host(name))
    is_step = host.where(lambda _, name: separator and name.startswith(separator))
    # The threads of a communication backend are excluded, since they only sum received data.
    own = np.isin(host.thread, np.setdiff1d(host.thread[is_comm], host.thread[is_step]), invert=True)
    # What other threads prefetch or save in the background delays no step.
    main = np.isin(host.thread, host.thread[is_step]) if is_step.any() else own
    regions = _regions(host, own, main)
    if len(device.name):
        return _measure_device(rank_events, base_us, host, device, numbers, steps, separator, main, regions)
    is_op = own & host.where(lambda category, _: category == "cpu_op")
    waits = host.where(lambda _, name: names.waits(name))
    sets = {"step": steps, **regions}
    sets["compute"] = union(host.intervals(is_op & ~waits))
    sets["waits"] = union(host.intervals(is_op & waits))
    sets["comm"] = union(host.intervals(is_comm))
    return Steps(numbers, *steps, _times_on_host(sets, steps), regions, separator, steps)


def _measure_device(
    rank_events: RankEvents,
    base_us: float,
    host: _Named,
    device: _Named,
    numbers: tuple[int, ...],
    steps: Intervals,
    separator: str,
    main: _Mask,
    on_host: dict[str, Intervals],
) -> Steps:
    calls = rank_events.launches
    called = calls.start_ns(base_us)
    launches = find_launches(
        rank_events.device.values("correlation"),
        device.starts,
        calls.values("correlation"),
        calls.thread,
        (called, called + calls.dur_ns()),
    )
    on_host_steps = steps
    if separator:
        steps = step_windows(steps, launches, device.ends)
    else:  # without the start of the program
        steps = launches.moment.min(keepdims=True), device.ends.max(keepdims=True)
    waited_for = {region: on_host[region] for region in _WAITED_FOR}
    events, whole = (device.starts, device.ends), (int(steps[0].min()), int(steps[1].max()))
    busy = union(events)
    activity = DeviceActivity(
        events=events,
        busy=busy,
        gaps=idle_gaps(busy, events, launches, whole),
        launches=launches,
        region=_regions_of_launches(host, launches, main),
        waited_for=waited_for,
    )
    is_collective = device.where(lambda category, _: category == COLLECTIVE)
    is_copy = device.where(lambda category, _: category in ("gpu_memcpy", "gpu_memset"))
    is_kernel = ~is_collective & ~is_copy
    sets = {"step": steps, "compute": union(device.intervals(is_kernel))}
    sets |= {"comm": union(device.intervals(is_collective)), "memcpy": union(device.intervals(is_copy))}
    sets |= {f"idle_{region}": intervals for region, intervals in waited_for.items()}
    sets |= activity.gaps.by_cause()
    for region in _INNER_FIRST:
        if region != "data":
            sets[region] = union(device.intervals(is_kernel & (activity.region == region)))
    is_in_region = is_kernel & ~np.isin(activity.region, ("", "data"))
    regions = _blocks(device.intervals(is_in_region), activity.region[is_in_region], steps)
    regions["data"] = on_host["data"]
    is_unlinked = is_kernel & ~launches.is_known
    return Steps(
        numbers, *steps, _times_on_device(sets, steps), regions, separator, on_host_steps,
        outside_share=_outside_share(activity.busy, steps),
        unlinked_share=float(is_unlinked.sum() / max(1, is_kernel.sum())),
        device=activity,
    )  # fmt: skip


def _outside_share(busy: Intervals, steps: Intervals) -> float:
    """Returns the part of the busy time that is outside the steps."""
    moments, inside = cover({"step": steps, "busy": busy})
    lengths, busy_ns = np.diff(moments), int((busy[1] - busy[0]).sum())
    counted_ns = int(lengths[inside["step"] & inside["busy"]].sum())
    return 1 - counted_ns / busy_ns if busy_ns else 0.0


def _regions_of_launches(host: _Named, launches: Launches, main: _Mask) -> npt.NDArray[np.object_]:
    """Returns the region in which each event of the device was launched; empty outside of all regions."""
    regions, masks = [*_IN_CLOSURE, *_INNER_FIRST], []
    optimizer = host.intervals(host.region == "optimizer")
    for number, region in enumerate(regions):
        mask = host.region == region
        if number < len(_IN_CLOSURE):
            mask[mask] = is_within(host.intervals(mask), optimizer)
        masks.append(is_inside(launches, host.thread[mask], host.intervals(mask)))
    # Everything that autograd's threads launch, including the hooks of DDP, belongs to the backward pass.
    threads = np.setdiff1d(host.thread[host.where(names.is_node)], host.thread[main])
    masks.append(np.isin(launches.thread, threads))
    return np.select(masks, [*regions, "backward"], "")


def _windows(host: _Named, device: _Named) -> tuple[tuple[int, ...], Intervals, str]:
    """Returns numbers and intervals of the steps in order, and the value of RankTrace.steps_from."""
    windows: dict[int, tuple[int, int]] = {}
    for at in np.flatnonzero(host.where(lambda _, name: name.startswith(names.STEP))):
        number = host.names[host.name[at]][1].removeprefix(names.STEP)
        if number.isdecimal() and len(number) <= _MOST_DIGITS:
            windows.setdefault(int(number), (int(host.starts[at]), int(host.ends[at])))
    if windows:
        ordered = sorted(windows.items(), key=lambda step: step[1])
        starts, ends = (np.array([step[1][side] for step in ordered], np.int64) for side in (0, 1))
        return tuple(number for number, _ in ordered), (starts, ends), names.STEP
    updates = np.unique(host.ends[host.where(lambda _, name: name.startswith(names.UPDATE))])
    if len(updates) >= _LEAST_UPDATES:
        return tuple(range(1, len(updates))), (updates[:-1], updates[1:]), names.UPDATE
    starts = np.concatenate([host.starts, device.starts])
    if not len(starts):
        return (), NO_INTERVALS, ""
    ends = np.concatenate([host.ends, device.ends])
    return (0,), (starts.min(keepdims=True), ends.max(keepdims=True)), ""


def _regions(events: _Named, own: _Mask, main: _Mask) -> dict[str, Intervals]:
    """Returns the intervals of each region: those of its annotations and operators."""
    regions = {
        region: union(events.intervals((main if region in _WAITED_FOR else own) & (events.region == region)))
        for region in REGIONS
    }
    is_node = own & events.where(names.is_node)
    passes = [
        _passes(events, is_node, events.thread == thread) for thread in np.unique(events.thread[is_node])
    ]
    regions["backward"] = union(_joined([regions["backward"], *passes]))
    return regions


def _passes(events: _Named, is_node: _Mask, on_thread: _Mask) -> Intervals:
    """Joins the nodes that a thread runs one after the other, since autograd is at work between them."""
    starts, ends = union(events.intervals(is_node & on_thread))
    begun = np.sort(events.starts[on_thread])
    begins = np.searchsorted(begun, starts[1:]) > np.searchsorted(begun, ends[:-1])
    return starts[np.append(True, begins)], ends[np.append(begins, True)]


def _joined(parts: list[Intervals]) -> Intervals:
    starts, ends = (np.concatenate(sides) for sides in zip(*parts, strict=True))
    return starts, ends


def _blocks(kernels: Intervals, region: npt.NDArray[np.object_], steps: Intervals) -> dict[str, Intervals]:
    """Returns for each region the times in which the device runs kernels of no other region."""
    order = np.argsort(kernels[0], kind="stable")
    (starts, ends), region = (side[order] for side in kernels), region[order]
    step = np.searchsorted(steps[0], starts, side="right")
    is_first = np.append(True, (region[1:] != region[:-1]) | (step[1:] != step[:-1]))[: len(starts)]
    finishes = np.maximum.reduceat(ends, np.flatnonzero(is_first)) if len(starts) else ends
    begins, region = starts[is_first], region[is_first]
    return {name: (begins[region == name], finishes[region == name]) for name in REGIONS}


def _times_on_host(sets: dict[str, Intervals], steps: Intervals) -> tuple[Times, ...]:
    """Divides each step; a region includes operators and Python code."""
    in_closure = {region: _select(sets[region], sets["optimizer"]) for region in _IN_CLOSURE}
    moments, covers = cover(sets | {f"{region} in closure": each for region, each in in_closure.items()})
    compute = covers["compute"] & ~covers["waits"]
    parts = [("comm_exposed", covers["comm"] & ~compute)]
    parts += [(region, covers[region]) for region in ("data", "snapshot")]
    parts += [(region, covers[f"{region} in closure"]) for region in _IN_CLOSURE]
    parts += [(region, covers[region]) for region in _INNER_FIRST]
    parts += [("other", compute)]
    return _sum_up(moments, covers, steps, parts, covers["comm"] & compute, "idle")


def _select(inner: Intervals, outer: Intervals) -> Intervals:
    """Returns the inner intervals that are within an outer one."""
    mask = is_within(inner, outer)
    return inner[0][mask], inner[1][mask]


def _times_on_device(sets: dict[str, Intervals], steps: Intervals) -> tuple[Times, ...]:
    """Divides each step. A device that neither computes nor communicates nor copies is idle."""
    moments, covers = cover(sets)
    compute = covers["compute"]
    parts = [(region, covers[region]) for region in _INNER_FIRST if region != "data"]
    parts += [("other", compute), ("comm_exposed", covers["comm"]), ("memcpy", covers["memcpy"])]
    # While the host launches a kernel or has launched it, the device does not wait for data.
    causes = ("idle_launch", "idle_kernel", "idle_other", "idle_data", "idle_snapshot")
    parts += [(cause, covers[cause]) for cause in causes]
    return _sum_up(moments, covers, steps, parts, covers["comm"] & compute, "idle_host")


def _sum_up(
    moments: Longs,
    covers: dict[str, _Mask],
    steps: Intervals,
    parts: list[tuple[str, _Mask]],
    hidden: _Mask,
    rest: str,
) -> tuple[Times, ...]:
    """Returns the times of each step. A moment belongs to the first part that contains it, or to `rest`."""
    lengths = np.diff(moments)
    column = [TIMES.index(f"{name}_s") for name, _ in parts]
    chosen = np.select([mask for _, mask in parts], column, TIMES.index(f"{rest}_s"))
    at = np.searchsorted(steps[0], moments[:-1], side="right") - 1
    inside = covers["step"] & (at >= 0)
    spent = np.zeros((len(steps[0]), len(TIMES)))
    np.add.at(spent, (at[inside], chosen[inside]), lengths[inside] * 1e-9)
    for part, causes in _IDLE_PARTS.items():
        for cause in causes:
            spent[:, TIMES.index(part)] += spent[:, TIMES.index(cause)]
    is_hidden = inside & hidden
    np.add.at(spent[:, TIMES.index("comm_hidden_s")], at[is_hidden], lengths[is_hidden] * 1e-9)
    return tuple(Times(**dict(zip(TIMES, row, strict=True))) for row in spent.tolist())
