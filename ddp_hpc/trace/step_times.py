"""Divides the time of each step of a rank into its parts."""

from __future__ import annotations

from dataclasses import dataclass

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
from ddp_hpc.trace.event_columns import Events
from ddp_hpc.trace.events_by_kind import Recording
from ddp_hpc.trace.intervals import NO_INTERVALS, Intervals, Longs, cover, index_at, is_within, overlap, union

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
    """What the events of a device, `Recording.device`, show."""

    busy: Intervals
    """The union of the events."""
    gaps: Gaps
    launches: Launches
    region: npt.NDArray[np.object_]
    """The region of REGIONS in which each event was launched; empty outside of all regions."""
    waited_for: dict[str, Intervals]
    """The times in which the host fetched data or saved a snapshot."""
    is_counted: _Mask
    """Whether the host launched each event in one of the steps; without a recorded launch, whether it starts
    in one and was not launched before the recording."""


@dataclass(frozen=True)
class Steps:
    """The steps of a rank, with times in nanoseconds relative to the first event."""

    numbers: tuple[int, ...]
    starts: Longs
    ends: Longs
    times: tuple[Times, ...]
    regions: dict[str, Intervals]
    """Sorted intervals; on a device, those in which its kernels run, but for `data` those of the host."""
    regions_on_host: dict[str, Intervals]
    computing: Intervals
    """The times in which a collective would be hidden, sorted."""
    separator: str
    """The value of RankTrace.steps_from."""
    on_host: Intervals
    """The starts and ends of the steps on the host. On a device, a step can begin and end later."""
    before_share: float = 0.0
    """The part of the device's busy time that is before the first step."""
    after_share: float = 0.0
    """The part that is after the last step."""
    unlinked_share: float = 0.0
    """The part of the kernels whose launch was not recorded, so that they belong to no region."""
    device: DeviceActivity | None = None
    """None if no activity of a device was recorded."""

    def numbers_at(self, moments: Longs) -> list[int | None]:
        """Returns the number of the step that contains each moment, or None."""
        at = index_at((self.starts, self.ends), moments)
        return [self.numbers[i] if i >= 0 else None for i in at.tolist()]

    def place(self, moment: int) -> tuple[int | None, float]:
        """Returns the number of the step that contains a moment, or None, and the time in it in seconds."""
        at = int(index_at((self.starts, self.ends), np.array([moment]))[0])
        return (self.numbers[at], (moment - int(self.starts[at])) * 1e-9) if at >= 0 else (None, 0.0)

    def contain_on_host(self, moments: Longs) -> _Mask:
        """Returns for each moment whether the host is in a step. Without marked steps, it always is."""
        return (index_at(self.on_host, moments) >= 0) | (not self.separator)

    def host_s(self) -> dict[str, float]:
        """Returns the time per step in which the host was in each region."""
        ns = {name: overlap(self.on_host, own) for name, own in self.regions_on_host.items()}
        return {name: time_ns * 1e-9 / (len(self.numbers) or 1) for name, time_ns in ns.items() if time_ns}


def measure(recording: Recording) -> Steps:
    """Returns the steps of a rank with the times of their parts."""
    host = recording.host_and_modules
    numbers, steps, separator = _windows(host, recording.device)
    is_comm = host.where(lambda category, name: category != "cpu_op" and names.runs_on_host(name))
    is_step = host.where(lambda _, name: separator and name.startswith(separator))
    # The threads of a communication backend are excluded, since they only sum received data.
    own = np.isin(host.thread, np.setdiff1d(host.thread[is_comm], host.thread[is_step]), invert=True)
    # What other threads prefetch or save in the background delays no step.
    main = np.isin(host.thread, host.thread[is_step]) if is_step.any() else own
    region = np.array([names.region_of_event(*pair) for pair in host.names], object)[host.name]
    regions = _regions(host, region, own, main)
    if len(recording.device):
        launches = find_launches(recording.device, recording.launches)
        launched_in = _regions_of_launches(host, region, launches, main)
        return _measure_device(recording, launches, launched_in, numbers, steps, separator, regions)
    is_op = own & host.where(lambda category, _: category == "cpu_op")
    waits = host.where(lambda _, name: names.waits(name))
    sets = {"step": steps, **regions}
    sets["compute"] = union(host.intervals(is_op & ~waits))
    sets["waits"] = union(host.intervals(is_op & waits))
    sets["comm"] = union(host.intervals(is_comm))
    moments, covers = cover({name: sets[name] for name in ("compute", "waits")})
    compute = covers["compute"] & ~covers["waits"]
    computing = moments[:-1][compute], moments[1:][compute]
    return Steps(numbers, *steps, _times_on_host(sets, steps), regions, regions, computing, separator, steps)


def _measure_device(
    recording: Recording,
    launches: Launches,
    launched_in: npt.NDArray[np.object_],
    numbers: tuple[int, ...],
    on_host_steps: Intervals,
    separator: str,
    on_host: dict[str, Intervals],
) -> Steps:
    device, is_collective = recording.device, recording.is_collective
    if separator:
        steps = step_windows(on_host_steps, launches, device)
    else:  # Without the start of the program, and without what the device ran before the recording.
        steps = device.starts.min(keepdims=True), device.ends.max(keepdims=True)
    busy, waited_for = union(device.intervals()), {region: on_host[region] for region in _WAITED_FOR}
    if separator and not (launched_in == "forward").any():
        launched_in[_precede_backward(launches, launched_in, on_host_steps)] = "forward"
    gaps = idle_gaps(busy, device, launches, steps)
    is_copy = device.where(lambda category, _: category in ("gpu_memcpy", "gpu_memset"))
    is_kernel = ~is_collective & ~is_copy
    sets = {"step": steps, "compute": union(device.intervals(is_kernel))}
    sets |= {"comm": union(device.intervals(is_collective)), "memcpy": union(device.intervals(is_copy))}
    sets |= {f"idle_{region}": intervals for region, intervals in waited_for.items()}
    sets |= gaps.by_cause()
    regions = {"data": on_host["data"]}
    for region in _INNER_FIRST[1:]:
        sets[region] = regions[region] = union(device.intervals(is_kernel & (launched_in == region)))
    is_in_step = index_at(steps, device.starts) >= 0
    is_counted = np.where(
        launches.is_known, index_at(on_host_steps, launches.moment) >= 0, is_in_step & ~launches.is_earlier
    ) | (not separator)
    kernels = is_kernel & is_counted
    is_unlinked = kernels & ~launches.is_known
    return Steps(
        numbers, *steps, _times_on_device(sets, steps), regions, on_host, sets["compute"], separator,
        on_host_steps,
        before_share=_share_within(busy, busy[0][:1], steps[0][:1]),
        after_share=_share_within(busy, steps[1][-1:], busy[1][-1:]),
        unlinked_share=float(is_unlinked.sum() / max(1, kernels.sum())),
        device=DeviceActivity(busy, gaps, launches, launched_in, waited_for, is_counted),
    )  # fmt: skip


def _share_within(busy: Intervals, start: Longs, end: Longs) -> float:
    """Returns the part of the busy time that is in an interval, none if this ends before its start."""
    return overlap(busy, (start, np.maximum(start, end))) / (int((busy[1] - busy[0]).sum()) or 1)


def _regions_of_launches(
    host: Events, region: npt.NDArray[np.object_], launches: Launches, main: _Mask
) -> npt.NDArray[np.object_]:
    """Returns the region in which each event of the device was launched; empty outside of all regions."""
    optimizer = host.intervals(region == "optimizer")
    chosen = [(region == name) & is_within(host.intervals(), optimizer) for name in _IN_CLOSURE]
    chosen += [region == name for name in _INNER_FIRST]
    masks = [is_inside(launches, host, mask) for mask in chosen]
    # Everything that autograd's threads launch, including the hooks of DDP, belongs to the backward pass.
    threads = np.setdiff1d(host.thread[host.where(names.is_node)], host.thread[main])
    masks.append(np.isin(launches.thread, threads))
    return np.select(masks, [*_IN_CLOSURE, *_INNER_FIRST, "backward"], "")


def _precede_backward(launches: Launches, region: npt.NDArray[np.object_], steps: Intervals) -> _Mask:
    """Returns for each event of the device whether it was launched outside of all regions and before the
    backward pass of its step, so that it belongs to a forward pass that is not annotated.
    """
    step_of, is_backward = index_at(steps, launches.moment), launches.is_known & (region == "backward")
    unknown = np.iinfo(np.int64).max
    begins = np.full(len(steps[0]) + 1, unknown)
    np.minimum.at(begins, step_of[is_backward], launches.moment[is_backward])
    is_before = (step_of >= 0) & (begins[step_of] < unknown) & (launches.moment < begins[step_of])
    chosen: _Mask = launches.is_known & (region == "") & is_before
    return chosen


def _windows(host: Events, device: Events) -> tuple[tuple[int, ...], Intervals, str]:
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
    starts, ends = _joined([host.intervals(), device.intervals()])
    if not len(starts):
        return (), NO_INTERVALS, ""
    return (0,), (starts.min(keepdims=True), ends.max(keepdims=True)), ""


def _regions(host: Events, region: npt.NDArray[np.object_], own: _Mask, main: _Mask) -> dict[str, Intervals]:
    """Returns the intervals of each region: those of its annotations and operators."""
    regions = {
        name: union(host.intervals((main if name in _WAITED_FOR else own) & (region == name)))
        for name in REGIONS
    }
    is_node = own & host.where(names.is_node)
    passes = [_passes(host, is_node, host.thread == thread) for thread in np.unique(host.thread[is_node])]
    regions["backward"] = union(_joined([regions["backward"], *passes]))
    return regions


def _passes(host: Events, is_node: _Mask, on_thread: _Mask) -> Intervals:
    """Joins the nodes that a thread runs one after the other, since autograd is at work between them."""
    starts, ends = union(host.intervals(is_node & on_thread))
    begun = np.sort(host.starts[on_thread])
    begins = np.searchsorted(begun, starts[1:]) > np.searchsorted(begun, ends[:-1])
    return starts[np.append(True, begins)], ends[np.append(begins, True)]


def _joined(parts: list[Intervals]) -> Intervals:
    starts, ends = (np.concatenate(sides) for sides in zip(*parts, strict=True))
    return starts, ends


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
