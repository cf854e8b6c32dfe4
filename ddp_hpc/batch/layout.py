"""Ranks, cores and devices of one node: derived from job and site, then checked."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_hpc.batch.job import Job
from ddp_hpc.batch.site import Site, queue_entries
from ddp_hpc.batch.site_tables import Queue
from ddp_hpc.errors import RequestError
from ddp_hpc.units import format_walltime, parse_walltime_s


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Layout:
    """What every node of the job looks like. `devices` is 0 where no GPU is known of.

    `cpus_per_rank` counts CPUs as Slurm does (hardware threads where the site
    has them), `threads_per_rank` counts cores; either is 0 where it is not known.
    """

    launcher: str
    ranks_per_node: int
    devices: int
    cpus_per_rank: int
    threads_per_rank: int
    walltime_s: int | None
    queue: str


def lay_out(job: Job, site: Site) -> Layout:
    """How the job's ranks lie on a node of the site.

    Raises:
        RequestError: more ranks than devices or cores, ranks that do not divide
            the devices, or more than the node has.
    """
    devices = _devices(job, site)
    ranks = job.ranks_per_node or devices or 1
    if devices:
        if ranks > devices:
            raise RequestError(
                f"{ranks} ranks per node were asked for; {site.title} has {devices} devices a node and NCCL "
                f"wants a device for each rank; use --ranks-per-node {devices} or fewer"
            )
        if devices % ranks:
            fitting = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
            raise RequestError(
                f"{ranks} ranks per node do not divide {devices} devices evenly; "
                f"use --ranks-per-node {fitting}"
            )
    cpus, cores = _cpus(job, site)
    if cores and ranks > cores:
        raise RequestError(
            f"{ranks} ranks per node were asked for on {cores} cores; each rank needs one; "
            f"use --ranks-per-node {cores} or fewer"
        )
    launcher = job.launcher or site.launch.default
    # A bound rank has the cores of its own set, however few ranks there are beside it.
    bound = len(site.launch.cpu_bind) if launcher == "mpiexec" else 0
    walltime = job.walltime_s
    if walltime is None and site.default_walltime:
        walltime = parse_walltime_s(site.default_walltime)
    return Layout(
        launcher=launcher,
        ranks_per_node=ranks,
        devices=devices,
        cpus_per_rank=cpus // ranks,
        threads_per_rank=cores // max(ranks, bound),
        walltime_s=walltime,
        queue=job.queue or site.default_queue,
    )


def _devices(job: Job, site: Site) -> int:
    known = site.node.devices
    if job.gpus_per_node and site.node.cpu_only:
        raise RequestError(
            f"{job.gpus_per_node} GPUs per node were asked for; {site.title} has none; "
            "leave --gpus-per-node out or choose another profile"
        )
    if job.gpus_per_node and known and job.gpus_per_node != known:
        raise RequestError(
            f"{job.gpus_per_node} GPUs per node were asked for; {site.title} gives whole nodes of {known}; "
            "leave --gpus-per-node out and choose --ranks-per-node"
        )
    return job.gpus_per_node or known


def _cpus(job: Job, site: Site) -> tuple[int, int]:
    """CPUs as the scheduler counts them, and cores, of one node."""
    cores, threads = site.node.cores, site.node.threads or site.node.cores
    if not job.cpus_per_node:
        return threads, cores
    if not cores:
        return job.cpus_per_node, job.cpus_per_node
    if job.cpus_per_node > threads:
        raise RequestError(
            f"{job.cpus_per_node} CPUs per node were asked for; {site.title} has {threads}; "
            "ask for at most that"
        )
    return job.cpus_per_node, max(1, job.cpus_per_node * cores // threads)


def advice(job: Job, site: Site) -> list[str]:
    """What the scheduler may dislike about the job, one line each: only warnings, since queue tables age."""
    layout = lay_out(job, site)
    lines = _queue_advice(job, layout, site)
    if site.account.required and not job.account:
        lines.append(
            f"{site.title} wants an account and none was given; use --account PROJECT or DDP_HPC_ACCOUNT, "
            "or name it when you submit"
        )
    account, spelled = job.account, site.account
    if account and not (account.startswith(spelled.prefix) and account.endswith(spelled.suffix)):
        like = f"{spelled.prefix}PROJECT{spelled.suffix}"
        lines.append(
            f"account {account} was given; at {site.title} such names look like {like}; is it whole?"
        )
    if site.scheduler != "local" and not layout.devices and not site.node.cpu_only:
        lines.append(
            f"profile {site.name} knows no GPUs, so the script asks for none; for GPUs give --gpus-per-node G"
        )
    return lines


def _queue_advice(job: Job, layout: Layout, site: Site) -> list[str]:
    if not layout.queue or not site.queues:
        return []
    queue = f"queue {layout.queue}" + (f" with QOS {job.qos}" if job.qos else "")
    entries = queue_entries(site, layout.queue, job.qos)
    if not entries:
        known = ", ".join(dict.fromkeys(_called(entry) for entry in site.queues))
        return [f"{queue} is not among those of {site.title} on {site.checked} ({known}); is it new?"]
    walltime_s = layout.walltime_s or 0
    counts = [(entry, devices_of(job, layout, site, entry)) for entry in entries]
    if any(takes(entry, job.num_nodes, devices, walltime_s) for entry, devices in counts):
        return []
    limits = "; ".join(_limits(entry) for entry in entries)
    limited = max((devices for entry, devices in counts if entry.max_devices), default=0)
    gpus = f" with {limited} GPUs" if limited else ""
    return [
        f"{job.num_nodes} nodes{gpus} for {format_walltime(walltime_s)} are outside what {queue} took on "
        f"{site.checked} ({limits}); the scheduler may refuse the job"
    ]


def devices_of(job: Job, layout: Layout, site: Site, queue: Queue) -> int:
    """Devices that the whole job takes from the queue.

    Those of its nodes; one a rank where the site's PBS is not told a number of devices.
    """
    a_rank_each = site.scheduler == "pbs" and not any(
        "devices}" in text for text in queue.resources or site.pbs.resources
    )
    return job.num_nodes * (layout.ranks_per_node if a_rank_each else layout.devices)


def takes(queue: Queue, num_nodes: int, devices: int, walltime_s: int) -> bool:
    """Whether the entry's limits leave room for so many nodes and devices for so long."""
    if not queue.takes_nodes(num_nodes):
        return False
    if queue.max_devices and devices > queue.max_devices:
        return False
    if queue.min_walltime and walltime_s < parse_walltime_s(queue.min_walltime):
        return False
    return not queue.max_walltime or walltime_s <= parse_walltime_s(queue.max_walltime)


def _called(queue: Queue) -> str:
    return f"{queue.name} with QOS {queue.qos}" if queue.qos else queue.name


def _limits(queue: Queue) -> str:
    limits = (
        f"{queue.min_nodes}-{queue.max_nodes} nodes"
        if queue.max_nodes
        else f"{queue.min_nodes} nodes or more"
    )
    if queue.max_devices:
        limits += f" and {queue.max_devices} GPUs"
    if queue.min_walltime:
        return f"{limits} for {queue.min_walltime} to {queue.max_walltime or 'any time'}"
    return f"{limits} up to {queue.max_walltime}" if queue.max_walltime else limits
