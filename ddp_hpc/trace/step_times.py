"""Divides the time of each step of a rank into its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_hpc.trace import event_names as names
from ddp_hpc.trace.columns import Columns
from ddp_hpc.trace.intervals import NO_INTERVALS, Intervals, Longs, cover, union
from ddp_hpc.trace.rank_events import COLLECTIVE, RankEvents
from ddp_hpc.trace.trace_records import PARTS, REGIONS, Times

# Inner regions come first, because data loading or a backward pass may be nested in a forward region.
_INNER_FIRST = ("data", "snapshot", "optimizer", "backward", "forward")

_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Steps:
    """The steps of a rank, with times in nanoseconds relative to the first event."""

    numbers: tuple[int, ...]
    starts: Longs
    ends: Longs
    times: tuple[Times, ...]
    regions: dict[str, Intervals]
    """Sorted intervals that do not overlap, from the device's timeline if it has them."""
    marked: bool
    """False if profiler.step() was not called, and the whole recording is treated as one step."""

    def step_of(self, moment_ns: int) -> int | None:
        """Returns the number of the step that contains the moment, or None."""
        at = int(np.searchsorted(self.starts, moment_ns, side="right")) - 1
        return self.numbers[at] if at >= 0 and moment_ns < self.ends[at] else None


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

    def intervals(self, mask: _Mask) -> Intervals:
        return self.starts[mask], self.ends[mask]


def measure(rank_events: RankEvents, base_us: float) -> Steps:
    """Returns the steps of a rank with the times of their parts."""
    host = _Named(rank_events.host, base_us)
    device = _Named(rank_events.device, base_us)
    numbers, steps, marked = _windows(host, device)
    is_comm = host.where(lambda category, name: category != "cpu_op" and names.annotated_kind(name))
    is_step = host.where(lambda _, name: name.startswith(names.STEP))
    # The threads of a communication backend are excluded, since they only sum received data.
    own = np.isin(host.thread, np.setdiff1d(host.thread[is_comm], host.thread[is_step]), invert=True)
    regions = _regions(host, own, steps)
    sets = {"step": steps} | {f"host {region}": times for region, times in regions.items()}
    on_device = len(device.name) > 0
    if on_device:
        seen = _regions(_Named(rank_events.device_regions, base_us), None, steps)
        regions |= {region: times for region, times in seen.items() if len(times[0])}
        collective = device.where(lambda category, _: category == COLLECTIVE)
        sets["compute"], sets["comm"] = (union(device.intervals(m)) for m in (~collective, collective))
        sets["waits"] = NO_INTERVALS
    else:
        is_op = own & host.where(lambda category, _: category == "cpu_op")
        waits = host.where(lambda _, name: names.waits(name))
        sets["compute"] = union(host.intervals(is_op & ~waits))
        sets["waits"] = union(host.intervals(is_op & waits))
        sets["comm"] = union(host.intervals(is_comm))
    sets |= regions
    return Steps(numbers, *steps, _times(sets, steps, on_device), regions, marked)


def _windows(host: _Named, device: _Named) -> tuple[tuple[int, ...], Intervals, bool]:
    """Returns numbers and intervals of the steps in order, and whether the trace contains steps."""
    found: dict[int, tuple[int, int]] = {}
    for at in np.flatnonzero(host.where(lambda _, name: name.startswith(names.STEP))):
        number = host.names[host.name[at]][1].removeprefix(names.STEP)
        if number.isdecimal():
            found.setdefault(int(number), (int(host.starts[at]), int(host.ends[at])))
    if found:
        ordered = sorted(found.items(), key=lambda step: step[1])
        starts, ends = (np.array([step[1][side] for step in ordered], np.int64) for side in (0, 1))
        return tuple(number for number, _ in ordered), (starts, ends), True
    starts = np.concatenate([host.starts, device.starts])
    if not len(starts):
        return (), NO_INTERVALS, False
    ends = np.concatenate([host.ends, device.ends])
    return (0,), (starts.min(keepdims=True), ends.max(keepdims=True)), False


def _regions(events: _Named, own: _Mask | None, steps: Intervals) -> dict[str, Intervals]:
    """Returns the regions from annotations or, if there are none, from operators of only that region."""
    own = np.ones(len(events.name), bool) if own is None else own
    is_op = events.where(lambda category, _: category == "cpu_op")
    region_of = np.array([names.region_of(name) or "" for _, name in events.names], object)[events.name]
    regions = {}
    for region in REGIONS:
        mask = own & (region_of == region)
        if (mask & ~is_op).any():
            regions[region] = union(events.intervals(mask & ~is_op))
        else:
            regions[region] = _one_per_step(events.intervals(mask), steps)
    return regions


def _one_per_step(pieces: Intervals, steps: Intervals) -> Intervals:
    """Returns the interval from the first to the last of the pieces in each step."""
    starts, ends = pieces
    inside = [(starts >= start) & (starts < end) for start, end in zip(*steps, strict=True)]
    spans = [(starts[mask].min(), ends[mask].max()) for mask in inside if mask.any()]
    return union((np.array([s for s, _ in spans], np.int64), np.array([e for _, e in spans], np.int64)))


def _times(sets: dict[str, Intervals], steps: Intervals, on_device: bool) -> tuple[Times, ...]:
    moments, covers = cover(sets)
    lengths = np.diff(moments)
    compute = covers["compute"] & ~covers["waits"]
    exposed = covers["comm"] & ~compute
    # On the host, a region includes operators and Python code. A device is either busy or waiting, and
    # its waiting time is attributed to the concurrent activity of the host.
    if on_device:
        parts = [(region, compute & covers[region]) for region in _INNER_FIRST]
        parts += [("other", compute), ("comm_exposed", exposed)]
        parts += [(region, covers[f"host {region}"]) for region in ("data", "snapshot")]
    else:
        parts = [("comm_exposed", exposed)]
        parts += [(region, covers[region]) for region in _INNER_FIRST]
        parts += [("other", compute)]
    column = [PARTS.index(f"{name}_s") for name, _ in parts]
    chosen = np.select([mask for _, mask in parts], column, PARTS.index("idle_s"))
    at = np.searchsorted(steps[0], moments[:-1], side="right") - 1
    inside = covers["step"] & (at >= 0)
    spent = np.zeros((len(steps[0]), len(PARTS)))
    np.add.at(spent, (at[inside], chosen[inside]), lengths[inside] * 1e-9)
    hidden = np.zeros(len(steps[0]))
    overlap = inside & covers["comm"] & compute
    np.add.at(hidden, at[overlap], lengths[overlap] * 1e-9)
    return tuple(
        Times(**dict(zip(PARTS, row, strict=True)), comm_hidden_s=hidden_s)
        for row, hidden_s in zip(spent.tolist(), hidden.tolist(), strict=True)
    )
