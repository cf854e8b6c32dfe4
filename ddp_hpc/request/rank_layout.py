"""Layout of ranks, cores, memory and devices on one node, from the job request and the site profile."""

from __future__ import annotations

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.record import record
from ddp_hpc.base.units import parse_walltime_s
from ddp_hpc.request.job import Job
from ddp_hpc.request.part_of_node import part_of_node
from ddp_hpc.request.queue_choice import QueueChoice, choose_queue
from ddp_hpc.sites.site import Site


@record
class Layout:
    """The layout of every node of a job. `devices` is 0 if the number of GPUs is unknown.

    `cpus_per_rank` is a number of CPUs as Slurm counts them, which are hardware threads at some sites.
    `threads_per_rank` is a number of cores. Both are 0 if unknown. `memory_mib` is the main memory that comes
    with the devices of the node. It is 0 if it is unknown, if whole nodes are allocated, or if the job
    requests an amount of its own.
    """

    launcher: str
    ranks_per_node: int
    devices: int
    cpus_per_rank: int
    threads_per_rank: int
    memory_mib: int
    walltime_s: int | None
    queue: QueueChoice


def lay_out(job: Job, site: Site) -> Layout:
    """Returns the layout of the job's ranks on a node of the site.

    Raises:
        RequestError: there are more ranks than devices or cores, the devices cannot be divided evenly among
            the ranks, the request exceeds the node, or no queue takes it.
    """
    site = part_of_node(job, site)
    devices = _devices(job, site)
    ranks = job.ranks_per_node or devices or 1
    if devices:
        if ranks > devices:
            raise RequestError(
                f"{ranks} ranks per node were requested, but {site.title} has {devices} devices per node and "
                f"NCCL requires one device per rank. Use --ranks-per-node {devices} or fewer."
            )
        if devices % ranks:
            fitting = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
            raise RequestError(
                f"{devices} devices cannot be divided evenly among {ranks} ranks per node. "
                f"Use --ranks-per-node {fitting}."
            )
    cpus, cores = _cpus(job, site, devices)
    if cores and ranks > cores:
        raise RequestError(
            f"{ranks} ranks per node were requested on {cores} cores, but each rank needs a core. "
            f"Use --ranks-per-node {cores} or fewer."
        )
    launcher = job.launcher or site.launch.default
    threads = cores // ranks
    if launcher == "mpiexec" and site.launch.cpu_bind:
        # A rank has only the cores of its own set, even if there are more sets than ranks.
        threads = min(threads, *map(_num_cores, site.launch.cpu_bind))
    walltime = job.walltime_s
    if walltime is None and site.default_walltime:
        walltime = parse_walltime_s(site.default_walltime)
    return Layout(
        launcher=launcher,
        ranks_per_node=ranks,
        devices=devices,
        cpus_per_rank=cpus // ranks,
        threads_per_rank=threads,
        memory_mib=0 if job.mem else site.node.memory_mib_per_device * devices,
        walltime_s=walltime,
        queue=choose_queue(job, site, ranks, devices, walltime),
    )


def _num_cores(ids: str) -> int:
    """Returns the number of cores in a set such as 0-3,8."""
    ranges = [part.split("-") for part in ids.split(",")]
    return sum(int(numbers[-1]) - int(numbers[0]) + 1 for numbers in ranges)


def _devices(job: Job, site: Site) -> int:
    known = site.node.devices
    if job.gpus_per_node == 0:
        return 0
    if job.gpus_per_node and site.node.cpu_only:
        raise RequestError(
            f"{job.gpus_per_node} GPUs per node were requested, but {site.title} has none. "
            "Omit --gpus-per-node or choose another profile."
        )
    if job.gpus_per_node and known and job.gpus_per_node != known:
        raise RequestError(
            f"{job.gpus_per_node} GPUs per node were requested, but {site.title} allocates whole nodes with "
            f"{known}. Omit --gpus-per-node and use --ranks-per-node."
        )
    # Where jobs can request single GPUs, a job for the GPU nodes gets one, rather than none.
    return job.gpus_per_node or known or int(bool(site.node.device))


def _cpus(job: Job, site: Site, devices: int) -> tuple[int, int]:
    """Returns the number of CPUs of a node, as the scheduler counts them, and the number of its cores."""
    cores, threads = site.node.cores, site.node.threads or site.node.cores
    if not cores:
        cores = site.node.cores_per_device * devices
        threads = site.node.threads_per_device * devices or cores
        if job.cpus_per_node:
            return job.cpus_per_node, job.cpus_per_node
    if not job.cpus_per_node:
        return threads, cores
    if job.cpus_per_node > threads:
        raise RequestError(
            f"{job.cpus_per_node} CPUs per node were requested, but {site.title} has {threads}. "
            "Request at most that many."
        )
    return job.cpus_per_node, max(1, job.cpus_per_node * cores // threads)
