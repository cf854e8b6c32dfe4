"""Computes how many ranks fit in an allocation or on this machine, and their layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ddp_hpc.base.errors import RequestError
from ddp_hpc.discovery.visible_gpus import gpus_here
from ddp_hpc.launch.find_allocation import cpus_here, ranks_for
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout, lay_out
from ddp_hpc.schedulers.allocation import THIS_MACHINE, Allocation
from ddp_hpc.sites.site import Site


def fit(
    job: Job, site: Site, allocation: Allocation, num_ranks: int | None, environ: Mapping[str, str]
) -> tuple[Job, Layout, int]:
    """Returns the job with its number of nodes set, the layout of each node, and the total number of ranks.

    Without `num_ranks`, each node gets one rank per GPU; without GPUs, the number of tasks that the job
    requested; and otherwise one rank per 8 cores.

    Raises:
        RequestError: there are more ranks than fit, or `lay_out` rejects the layout.
    """
    # This machine may be oversubscribed: CPUs can be shared, and gloo works with a shared GPU.
    is_free = allocation is THIS_MACHINE and job.ranks_per_node is None
    devices, cpus = _devices(site, allocation, environ), _cpus(site, allocation)
    if job.ranks_per_node:
        limit, unit = job.ranks_per_node, "rank"
    else:
        limit, unit = (devices, "GPU") if devices else (cpus, "CPU")
    if num_ranks is None:
        per_node = job.ranks_per_node or devices or allocation.tasks_per_node or ranks_for(cpus)
        num_ranks = per_node * allocation.num_nodes
    elif is_free:
        per_node = num_ranks
    elif num_ranks > limit * allocation.num_nodes:
        room = limit * allocation.num_nodes
        raise RequestError(
            f"-n {num_ranks} is too large: {allocation} with {limit} {unit}{'s' * (limit > 1)} per node can "
            f"run {room} rank{'s' * (room > 1)}. Use -n {room} or less, or a larger allocation."
        )
    else:
        per_node = job.ranks_per_node or devices or math.ceil(num_ranks / allocation.num_nodes)
    job = replace(
        job,
        num_nodes=math.ceil(num_ranks / per_node),
        ranks_per_node=per_node,
        gpus_per_node=None if allocation is THIS_MACHINE or site.node.devices else devices or None,
        cpus_per_node=None if allocation is THIS_MACHINE else cpus,
    )
    # Ranks are distributed evenly: 6 ranks on 2 nodes with 4 GPUs each are 3 per node, not 4 and 2.
    # The limits of queues held for the job that has this allocation.
    layout = replace(
        lay_out(job, replace(site, queues=())), ranks_per_node=math.ceil(num_ranks / job.num_nodes)
    )
    if layout.launcher == "torchrun" and num_ranks % job.num_nodes:
        raise RequestError(
            f"-n {num_ranks} is not divisible by {job.num_nodes} nodes, but torchrun starts the same number "
            f"of ranks on each node. Use -n {layout.ranks_per_node * job.num_nodes}."
        )
    return job, layout, num_ranks


def _devices(site: Site, allocation: Allocation, environ: Mapping[str, str]) -> int:
    if site.node.cpu_only:
        return 0
    if site.node.devices and allocation.gpus_per_node:
        return min(site.node.devices, allocation.gpus_per_node)  # the job may have only part of a shared node
    return site.node.devices or allocation.gpus_per_node or gpus_here(environ)


def _cpus(site: Site, allocation: Allocation) -> int:
    """Returns the CPUs of a node, counting hardware threads if the site has them."""
    known = site.node.threads or site.node.cores
    return min(allocation.cpus_per_node or known or cpus_here(), known or 1 << 20)
