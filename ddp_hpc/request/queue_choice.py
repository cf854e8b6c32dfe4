"""Chooses the queue of a job by the limits in the site profile, then by the profile's order of preference."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.record import record
from ddp_hpc.base.units import counted, format_walltime, parse_walltime_s
from ddp_hpc.request.job import Job
from ddp_hpc.sites.profile_tables import Queue
from ddp_hpc.sites.site import Site, queue_entries


@record
class QueueChoice:
    """The queue and the QOS of a job, both empty if the scheduler chooses.

    `why` says why the job does not get the default queue; it is empty if the user or the profile chose.
    """

    name: str
    qos: str = ""
    why: str = ""


@record
class Size:
    """What the limits of queues restrict; `num_devices` is the number in the whole job."""

    num_nodes: int
    num_devices: int
    walltime_s: int


def choose_queue(
    job: Job, site: Site, ranks_per_node: int, devices: int, walltime_s: int | None
) -> QueueChoice:
    """Returns the queue of a job: the user's, otherwise the first one in the profile that takes the job.

    The default queue is the first choice, then come the others in the order of the profile. A profile without
    a default queue leaves the choice to the scheduler if one of its own queues takes the job.

    Raises:
        RequestError: no queue takes the job, and the user did not choose one.
    """

    def size(entry: Queue) -> Size:
        return size_of(job, site, entry, ranks_per_node, devices, walltime_s)

    def fits(entry: Queue) -> bool:
        return takes(entry, size(entry))

    if job.queue or job.qos:
        named = job.queue or site.default_queue
        entries = queue_entries(site, named, job.qos)
        chosen = next(filter(fits, entries), None) or next(iter(entries), None)
        return QueueChoice(name=named, qos=job.qos or (chosen.qos if chosen else ""))

    first, others = _preferences(site)
    if not first:  # the limits of the default are unknown
        return QueueChoice(name=site.default_queue)
    if not devices:
        for entry in filter(fits, (entry for entry in others if entry.cpu_only)):
            return QueueChoice(
                name=entry.name, qos=entry.qos, why=f"queue {called(entry)}, for a job without GPUs"
            )
    for entry in filter(fits, first):
        return QueueChoice(name=site.default_queue, qos=entry.qos)
    for entry in filter(fits, others):
        why = (
            f"queue {called(entry)}, because {_default_or(first[0], site)} does not take "
            f"{_described(size(entry), entry)} ({all_limits(first)} on {site.checked})"
        )
        return QueueChoice(name=entry.name, qos=entry.qos, why=why)
    raise RequestError(_refusal(site, (*first, *others), size(first[0])))


def _preferences(site: Site) -> tuple[list[Queue], list[Queue]]:
    """Returns the entries of the default queue, and those of the others that may be chosen without the user.

    Both are in the order of the profile. Without a default queue, the first list has the queues from which
    the scheduler chooses.
    """
    open_to_users = [entry for entry in site.queues if entry.name and entry.submit and entry.automatic]
    if site.default_queue:
        first = [entry for entry in open_to_users if entry.name == site.default_queue]
    else:
        first = [entry for entry in site.queues if not (entry.name and entry.submit)]
    return first, [entry for entry in open_to_users if entry not in first]


def largest_num_nodes(site: Site) -> int | None:
    """Returns the largest number of nodes that a queue takes for a job with GPUs; None without a limit."""
    limits = [entry.max_nodes for entry in site.queues if not entry.cpu_only]
    return max(limits) if limits and all(limits) else None


def size_of(
    job: Job, site: Site, queue: Queue, ranks_per_node: int, devices: int, walltime_s: int | None
) -> Size:
    """Returns the size of a job as a queue counts it.

    The job uses all devices of its nodes, or one device per rank if the site's resources do not request
    devices.
    """
    resources = queue.resources or site.pbs.resources
    one_per_rank = resources and not any("devices}" in text for text in resources)
    per_node = ranks_per_node if one_per_rank and devices else devices
    return Size(num_nodes=job.total_nodes, num_devices=job.total_nodes * per_node, walltime_s=walltime_s or 0)


def takes(queue: Queue, size: Size) -> bool:
    """Returns whether a job of this size is within the limits of the queue entry."""
    least_s, most_s = (
        parse_walltime_s(text) if text else 0 for text in (queue.min_walltime, queue.max_walltime)
    )
    return (
        queue.takes_nodes(size.num_nodes)
        and not (queue.max_devices and size.num_devices > queue.max_devices)
        and least_s <= size.walltime_s
        and not (most_s and size.walltime_s > most_s)
        and not (queue.cpu_only and size.num_devices)
    )


def limits_of(queue: Queue) -> str:
    """Returns the limits of a queue entry, for example `1-2 nodes up to 01:00:00`."""
    if queue.max_nodes == queue.min_nodes:
        limits = counted(queue.max_nodes, "node")
    elif queue.max_nodes:
        limits = f"{queue.min_nodes}-{queue.max_nodes} nodes"
    else:
        limits = f"{queue.min_nodes} nodes or more" if queue.min_nodes > 1 else "any number of nodes"
    if queue.max_devices:
        limits += f" and {queue.max_devices} GPUs"
    if queue.cpu_only:
        limits += " without GPUs"
    if queue.min_walltime:
        return f"{limits} for {queue.min_walltime} to {queue.max_walltime or 'any time'}"
    return f"{limits} up to {queue.max_walltime}" if queue.max_walltime else limits


def all_limits(entries: Sequence[Queue]) -> str:
    """Returns the limits of several queue entries."""
    return "; ".join(map(limits_of, entries))


def called(queue: Queue) -> str:
    """Returns the name of a queue entry with its QOS; empty if it has no name."""
    return f"{queue.name} with QOS {queue.qos}" if queue.name and queue.qos else queue.name


def _refusal(site: Site, entries: Sequence[Queue], size: Size) -> str:
    limits = "; ".join(f"{_default_or(entry, site)} takes {limits_of(entry)}" for entry in entries)
    return (
        f"no queue of {site.title} took {_described(size, entries[0])} when the profile was checked on "
        f"{site.checked}: {limits}. Use other --nodes, --gpus-per-node or --walltime, or name a queue with "
        "--queue."
    )


def _described(size: Size, queue: Queue) -> str:
    gpus = f" with {counted(size.num_devices, 'GPU')}" if queue.max_devices or queue.cpu_only else ""
    walltime = f" for {format_walltime(size.walltime_s)}" if size.walltime_s else ""
    return f"{counted(size.num_nodes, 'node')}{gpus}{walltime}"


def _default_or(queue: Queue, site: Site) -> str:
    return called(queue) or f"the default of {site.title}"
