"""Where each step's time went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_hpc.trace import names
from ddp_hpc.trace.columns import Columns
from ddp_hpc.trace.gather import COLLECTIVE, Gathered
from ddp_hpc.trace.intervals import NO_INTERVALS, Intervals, Longs, cover, joined
from ddp_hpc.trace.model import PARTS, REGIONS, Times

_STEP = "ProfilerStep#"
# The inner ones first: a batch may be fetched, or gradients taken, within what is called forward.
_INNER_FIRST = ("data", "snapshot", "optimizer", "backward", "forward")

_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Steps:
    """A rank's steps; times in nanoseconds from the first event."""

    numbers: tuple[int, ...]
    starts: Longs
    ends: Longs
    times: tuple[Times, ...]
    regions: dict[str, Intervals]
    """Disjoint and in order; as the device saw them, where it did."""
    marked: bool
    """False: nobody called the profiler's step(), and the whole recording is taken for one."""

    def step_of(self, moment_ns: int) -> int | None:
        """The number of the step in which the moment lies."""
        at = int(np.searchsorted(self.starts, moment_ns, side="right")) - 1
        return self.numbers[at] if at >= 0 and moment_ns < self.ends[at] else None


class _Named:
    """Columns whose names were looked up: a question about a name is asked once, not for every event."""

    def __init__(self, columns: Columns, base_us: float) -> None:
        self.names = list(columns.names)
        self.name = columns.name
        self.thread = columns.thread
        self.starts = columns.start_ns(base_us)
        self.ends = self.starts + columns.dur_ns()

    def where(self, question: Callable[[str, str], object]) -> _Mask:
        """The events for whose category and name the answer is yes."""
        return np.array([bool(question(*name)) for name in self.names], bool)[self.name]

    def intervals(self, mask: _Mask) -> Intervals:
        return self.starts[mask], self.ends[mask]


def measure(gathered: Gathered, base_us: float) -> Steps:
    """The steps of a rank, and what each of their moments was spent on."""
    host = _Named(gathered.host, base_us)
    device = _Named(gathered.device, base_us)
    numbers, steps, marked = _windows(host, device)
    is_comm = host.where(lambda category, name: category != "cpu_op" and names.annotated_kind(name))
    is_step = host.where(lambda _, name: name.startswith(_STEP))
    # A backend's own threads do not compute: they sum what comes in.
    own = np.isin(host.thread, np.setdiff1d(host.thread[is_comm], host.thread[is_step]), invert=True)
    regions = _regions(host, own, steps)
    sets = {"step": steps} | {f"host {region}": times for region, times in regions.items()}
    on_device = len(device.name) > 0
    if on_device:
        seen = _regions(_Named(gathered.device_regions, base_us), None, steps)
        regions |= {region: times for region, times in seen.items() if len(times[0])}
        collective = device.where(lambda category, _: category == COLLECTIVE)
        sets["compute"], sets["comm"] = (joined(device.intervals(m)) for m in (~collective, collective))
        sets["waits"] = NO_INTERVALS
    else:
        is_op = own & host.where(lambda category, _: category == "cpu_op")
        waits = host.where(lambda _, name: names.waits(name))
        sets["compute"] = joined(host.intervals(is_op & ~waits))
        sets["waits"] = joined(host.intervals(is_op & waits))
        sets["comm"] = joined(host.intervals(is_comm))
    sets |= regions
    return Steps(numbers, *steps, _times(sets, steps, on_device), regions, marked)


def _windows(host: _Named, device: _Named) -> tuple[tuple[int, ...], Intervals, bool]:
    """Numbers, starts and ends of the steps, in order."""
    found: dict[int, tuple[int, int]] = {}
    for at in np.flatnonzero(host.where(lambda _, name: name.startswith(_STEP))):
        number = host.names[host.name[at]][1].removeprefix(_STEP)
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
    """The regions, from annotations; from operators that can only be of one, where there are none."""
    regions = {}
    own = np.ones(len(events.name), bool) if own is None else own
    for region in REGIONS:
        mask = own & events.where(lambda _, name, region=region: names.region_of(name) == region)  # type: ignore[misc]  # a default binds it
        is_op = events.where(lambda category, _: category == "cpu_op")
        if (mask & ~is_op).any():
            regions[region] = joined(events.intervals(mask & ~is_op))
        else:
            regions[region] = _one_a_step(events.intervals(mask), steps)
    return regions


def _one_a_step(pieces: Intervals, steps: Intervals) -> Intervals:
    """From the first to the last of the pieces in each step."""
    starts, ends = pieces
    inside = [(starts >= start) & (starts < end) for start, end in zip(*steps, strict=True)]
    spans = [(starts[mask].min(), ends[mask].max()) for mask in inside if mask.any()]
    return joined((np.array([s for s, _ in spans], np.int64), np.array([e for _, e in spans], np.int64)))


def _times(sets: dict[str, Intervals], steps: Intervals, on_device: bool) -> tuple[Times, ...]:
    moments, covers = cover(sets)
    lengths = np.diff(moments)
    compute = covers["compute"] & ~covers["waits"]
    exposed = covers["comm"] & ~compute
    # On the host a region is what the program does, whether operators or Python; a device is
    # busy or waits, and its waiting is told apart by what the host did meanwhile.
    if on_device:
        parts = [(region, compute & covers[region]) for region in _INNER_FIRST]
        parts += [("other", compute), ("comm_exposed", exposed)]
        parts += [(region, covers[f"host {region}"]) for region in ("data", "snapshot")]
    else:
        parts = [("comm_exposed", exposed)]
        parts += [(region, covers[region]) for region in _INNER_FIRST]
        parts += [("other", compute)]
    names_of = [name for name, _ in parts] + ["idle"]
    chosen = np.select([mask for _, mask in parts], list(range(len(parts))), len(parts))
    at = np.searchsorted(steps[0], moments[:-1], side="right") - 1
    at = np.where(covers["step"], at, -1)
    num_steps = len(steps[0])
    spent = np.zeros((num_steps, len(names_of)))
    inside = at >= 0
    np.add.at(spent, (at[inside], chosen[inside]), lengths[inside] * 1e-9)
    hidden = np.zeros(num_steps)
    beside = inside & covers["comm"] & compute
    np.add.at(hidden, at[beside], lengths[beside] * 1e-9)
    return tuple(
        Times(
            **{
                part: float(sum(row[i] for i, name in enumerate(names_of) if f"{name}_s" == part))
                for part in PARTS
            },
            comm_hidden_s=float(hidden[number]),
        )
        for number, row in enumerate(spent)
    )
