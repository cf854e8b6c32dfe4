"""What a scheduler's commands report about a machine: versions, queues and nodes, for `profiles confirm`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ddp_hpc.schedulers.device_share import DeviceShare, NodeKind


@dataclass(frozen=True, kw_only=True)
class Question:
    """A command that only reads. `answers` says in one line what its output is for."""

    key: str
    answers: str
    command: str


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """The limits of a queue for one job; None if the scheduler reports no limit.

    `is_open` is False if the queue takes no jobs. `is_for_users` is False for queues that users do not
    choose, such as the destinations of a routing queue, and for queues whose nodes have no devices.
    """

    max_walltime_s: int | None = None
    min_walltime_s: int | None = None
    max_nodes: int | None = None
    min_nodes: int | None = None
    max_devices: int | None = None
    is_open: bool = True
    is_for_users: bool = True


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What the scheduler reports; empty or None if it did not answer.

    `queues` has the limits by the names of the queue and the QOS. `nodes` are the kinds of nodes of the
    default queue, and `share` is the share of these nodes that comes with one device.
    """

    version: str = ""
    queues: dict[tuple[str, str], QueueLimits] = field(default_factory=dict)
    nodes: tuple[NodeKind, ...] = ()
    share: DeviceShare | None = None


def least(*limits: int | None) -> int | None:
    """Returns the smallest limit; None if there is none."""
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def distinct_kinds(kinds: Iterable[NodeKind], *, with_gpus: bool) -> tuple[NodeKind, ...]:
    """Returns one node of each kind, and only nodes with GPUs if `with_gpus` and there are any."""
    unique = {(kind.gpus, kind.cpus, kind.threads_per_core, kind.memory_mib): kind for kind in kinds}
    chosen = [kind for kind in unique.values() if kind.gpus] if with_gpus else []
    return tuple(chosen or unique.values())
