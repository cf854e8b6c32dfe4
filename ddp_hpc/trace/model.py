"""What is known of captured traces: of a rank, and of all ranks of a run together. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields

REGIONS = ("data", "forward", "backward", "optimizer", "snapshot")


@dataclass(frozen=True)
class Times:
    """Where the time of a step went: every moment is counted once, so the first eight sum to the step.

    A region's time leaves out what it waited for communication. On a device, regions count what the device
    computed, `data_s` what it waited while the host fetched data, and `idle_s` the rest of its waiting.
    """

    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    snapshot_s: float = 0.0
    other_s: float = 0.0
    """Computed outside of these regions."""
    comm_exposed_s: float = 0.0
    """A collective ran, and nothing was computed meanwhile."""
    idle_s: float = 0.0
    """Nothing ran that the trace knows of."""
    comm_hidden_s: float = 0.0
    """A collective ran beside computation: not part of the sum."""

    @property
    def wall_s(self) -> float:
        """The step from its beginning to its end."""
        return float(sum(getattr(self, part) for part in PARTS))


PARTS = tuple(field.name for field in fields(Times) if field.name != "comm_hidden_s")


@dataclass(frozen=True)
class Step:
    """One step of one rank, as `ProfilerStep#number` has it."""

    number: int
    start_s: float
    """On the clock that all ranks of a capture share."""
    times: Times


@dataclass(frozen=True)
class Span:
    """A stretch of a rank's time line."""

    name: str
    """A region of REGIONS, or the kind of a collective."""
    start_s: float
    dur_s: float
    step: int | None
    """The step in which it starts, None outside of all."""
    bytes: int = 0
    """Of a collective."""


@dataclass(frozen=True)
class Collective:
    """One call as one rank saw it."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, broadcast, ..."""
    group: str
    """The process group's name, empty where the trace does not tell."""
    num_ranks: int
    bytes: int
    """Of the whole buffer, as nccl-tests counts: of all ranks for all_gather, reduce_scatter, all_to_all."""
    start_s: float
    dur_s: float
    step: int | None


@dataclass(frozen=True)
class Op:
    """An operator or a kernel, all calls of a rank's window together."""

    name: str
    num_calls: int
    total_s: float
    self_s: float
    """Without what it called; as torch's key averages have it."""


@dataclass(frozen=True)
class RankTrace:
    """All that the report needs of one rank's trace."""

    rank: int
    world_size: int
    path: str
    host: str
    device: str
    """cpu, cuda or xpu: where it computed."""
    steps: tuple[Step, ...]
    spans: tuple[Span, ...]
    collectives: tuple[Collective, ...]
    ops: tuple[Op, ...]
    """By self time, the longest first."""
    kernels: tuple[Op, ...]
    """What ran on the device."""
    peak_bytes: dict[str, int]
    """Most memory allocated at once: {"cpu": ..., "cuda:0": ...}."""
    num_events: int
    notes: tuple[str, ...]
    """What was left out of this rank's trace, and why."""
    zero_ns: int = 0
    """The moment from which the trace's own timestamps count: whole, as seconds would lose what is below
    a quarter of a microsecond."""
    clock_s: float = 0.0
    """By how much its times were moved, to be those of the capture's clock."""


@dataclass(frozen=True)
class CollectiveRow:
    """All calls of one kind and size."""

    kind: str
    group: str
    num_ranks: int
    bytes: int
    num_calls: int
    """Of a rank."""
    median_s: float
    """Of a call, waiting for late ranks and all."""
    total_s: float
    """Mean over the ranks."""
    transfer_s: float
    """Median from the last rank's coming to the end: what the network took. `median_s` if that is unknown."""
    busbw_bytes_per_s: float
    """From `transfer_s`, as nccl-tests defines it."""
    slowest_s: float
    slowest_rank: int
    slowest_step: int | None


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    region: str
    """Where it is slower than the median of the others."""
    excess_s: float
    """By how much, in a step."""
    share: float
    """Of the mean step."""
    evidence: str
    """One sentence."""


@dataclass(frozen=True)
class SlowLoad:
    """The data load that took longest."""

    rank: int
    step: int
    dur_s: float
    median_s: float
    """Of all ranks' loads."""


@dataclass(frozen=True)
class Capture:
    """One run's traces together."""

    name: str
    world_size: int
    ranks: tuple[RankTrace, ...]
    missing: tuple[int, ...]
    mean: Times
    """Of a step, over ranks and steps."""
    rank_means: tuple[Times, ...]
    """The same of each of `ranks`."""
    collectives: tuple[CollectiveRow, ...]
    """The one that keeps the network busiest first."""
    straggler: Straggler | None
    slowest_load: SlowLoad | None
    findings: tuple[str, ...]
    """What a reader should know first: a sentence each."""
    notes: tuple[str, ...]
    """What was left out, and why: of files and of ranks."""
