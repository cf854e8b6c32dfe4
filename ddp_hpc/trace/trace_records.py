"""Data classes of analyzed traces, per rank and per run. All times are in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

REGIONS = ("data", "forward", "backward", "optimizer", "snapshot")


@dataclass(frozen=True)
class Times:
    """The parts of a step's time. Each moment is counted once, so all but `comm_hidden_s` sum to the step.

    The time of a region excludes waiting for communication. On a device, regions are the time in which the
    device computed, `data_s` is the time it waited while the host fetched data, and `idle_s` is all other
    waiting.
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

    @property
    def wall_s(self) -> float:
        """The time from the start of the step to its end."""
        return float(sum(getattr(self, part) for part in PARTS))


TIMES = tuple(field.name for field in fields(Times))
PARTS = tuple(name for name in TIMES if name != "comm_hidden_s")


def present(times: Sequence[Times], fields: Sequence[str]) -> list[str]:
    """Returns those of the fields that are not 0 in all of `times`."""
    return [field for field in fields if any(getattr(one, field) for one in times)]


@dataclass(frozen=True)
class Step:
    """One step of one rank, recorded as `ProfilerStep#number`."""

    number: int
    start_s: float
    """Start on the common clock of the capture."""
    times: Times


@dataclass(frozen=True)
class Span:
    """A region on the timeline of a rank."""

    name: str
    """The name of the region, one of REGIONS."""
    start_s: float
    dur_s: float
    step: int | None
    """The step in which it starts, or None outside of steps."""


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


@dataclass(frozen=True)
class Op:
    """An operator or a kernel, summed over all calls in the recording of a rank."""

    name: str
    num_calls: int
    total_s: float
    self_s: float
    """Time without the operators that it called, as in torch's key averages."""


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
    spans: tuple[Span, ...]
    collectives: tuple[Collective, ...]
    ops: tuple[Op, ...]
    """Operators by self time, the longest first."""
    kernels: tuple[Op, ...]
    """Kernels and copies on the device, by total time."""
    peak_bytes: dict[str, int]
    """Peak of allocated memory per device: {"cpu": ..., "cuda:0": ...}."""
    num_events: int
    notes: tuple[str, ...]
    """The parts of this rank's trace that were skipped, with the reasons."""
    zero_ns: int = 0
    """The time to which the timestamps of the trace are relative, in nanoseconds, because a float in seconds
    would be accurate only to a quarter of a microsecond."""
    clock_s: float = 0.0
    """The correction that was added to the times for the common clock of the capture."""


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
    transfer_s: float
    """Median time from the start on the last rank to the end, or `median_s` if that is unknown."""
    busbw_bytes_per_s: float
    """Bus bandwidth as defined by nccl-tests, computed from `transfer_s`."""
    slowest_s: float
    slowest_rank: int
    slowest_step: int | None


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    region: str
    """The region in which it is slower than the median of the others."""
    excess_s: float
    """The difference per step."""
    share: float
    """The difference as a fraction of the mean step."""
    evidence: str
    """The explanation in one sentence."""


@dataclass(frozen=True)
class SlowLoad:
    """The slowest data load."""

    rank: int
    step: int
    dur_s: float
    median_s: float
    """Median of the data loads of all ranks."""


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
    slowest_load: SlowLoad | None
    findings: tuple[str, ...]
    """The main findings, one or two sentences each."""
    notes: tuple[str, ...]
    """Files, ranks and events that were skipped, and why."""
