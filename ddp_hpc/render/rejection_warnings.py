"""Warnings about jobs that a site's scheduler may reject. These are only warnings, because the queue tables
of a profile can be outdated.
"""

from __future__ import annotations

from pathlib import Path

from ddp_hpc.render.supervisor_line import resumption_of_job
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout, lay_out
from ddp_hpc.request.resumption import HOW_TO_RESUME
from ddp_hpc.schedulers.registry import scheduler_of_site
from ddp_hpc.sites.profile_tables import Queue
from ddp_hpc.sites.site import Site, queue_entries
from ddp_hpc.units import counted, format_walltime, parse_walltime_s


def never_resumed(job: Job, site: Site, directory: Path) -> str:
    """Returns that no other job resumes the program of a job, with the remedy; empty if one may."""
    if job.standalone or not scheduler_of_site(site).has_queue:
        return ""
    warning = resumption_of_job(job, directory).warning(lay_out(job, site).walltime_s)
    return f"{warning}; {HOW_TO_RESUME}" if warning else ""


def advice(job: Job, site: Site) -> list[str]:
    """Returns one line for each property of the job that the scheduler may reject."""
    layout = lay_out(job, site)
    lines = _queue_advice(job, layout, site)
    if site.account.required and not job.account:
        lines.append(
            f"{site.title} requires an account. Use --account PROJECT or DDP_HPC_ACCOUNT, or pass it on the "
            "command line when submitting."
        )
    account, spelled = job.account, site.account
    if account and not (account.startswith(spelled.prefix) and account.endswith(spelled.suffix)):
        like = f"{spelled.prefix}PROJECT{spelled.suffix}"
        lines.append(
            f"account {account} does not look like the accounts of {site.title}, such as {like}. "
            "Check its name."
        )
    asks_for_none = job.gpus_per_node == 0 or site.node.cpu_only
    if scheduler_of_site(site).has_queue and not layout.devices and not asks_for_none:
        lines.append(
            f"profile {site.name} defines no GPUs, so none are requested. Use --gpus-per-node to "
            "request GPUs."
        )
    return lines


def _queue_advice(job: Job, layout: Layout, site: Site) -> list[str]:
    if not site.queues:
        return []
    if layout.queue:
        queue = f"queue {layout.queue}" + (f" with QOS {job.qos}" if job.qos else "")
        entries = queue_entries(site, layout.queue, job.qos)
    else:
        queue = "the queues from which the scheduler chooses"
        entries = tuple(entry for entry in site.queues if not (entry.name and entry.submit))
        if not entries:
            return []
    if not entries:
        known = ", ".join(dict.fromkeys(_called(entry) for entry in site.queues))
        return [
            f"{site.title} had no {queue} when the profile was checked on {site.checked} (known: {known}). "
            "Check its name."
        ]
    walltime_s = layout.walltime_s or 0
    counts = [(entry, devices_of(job, layout, site, entry)) for entry in entries]
    if any(takes(entry, job.num_nodes, devices, walltime_s) for entry, devices in counts):
        return []
    limits = "; ".join(_limits(entry) for entry in entries)
    limited = max((devices for entry, devices in counts if entry.max_devices), default=0)
    gpus = f" with {limited} GPUs" if limited else ""
    return [
        f"{counted(job.num_nodes, 'node')}{gpus} for {format_walltime(walltime_s)} exceed the limits of "
        f"{queue} on {site.checked} ({limits}), so the scheduler may reject the job"
    ]


def devices_of(job: Job, layout: Layout, site: Site, queue: Queue) -> int:
    """Returns the number of devices of the whole job.

    The job uses all devices of its nodes, or one device per rank if the site's resources do not request
    devices.
    """
    resources = queue.resources or site.pbs.resources
    one_per_rank = scheduler_of_site(site).requests_by_resources and not any(
        "devices}" in text for text in resources
    )
    return job.num_nodes * (layout.ranks_per_node if one_per_rank else layout.devices)


def takes(queue: Queue, num_nodes: int, devices: int, walltime_s: int) -> bool:
    """Returns whether the job is within the limits of the queue entry."""
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
    if queue.max_nodes == queue.min_nodes:
        limits = counted(queue.max_nodes, "node")
    elif queue.max_nodes:
        limits = f"{queue.min_nodes}-{queue.max_nodes} nodes"
    else:
        limits = f"{queue.min_nodes} nodes or more" if queue.min_nodes > 1 else "any number of nodes"
    if queue.max_devices:
        limits += f" and {queue.max_devices} GPUs"
    if queue.min_walltime:
        return f"{limits} for {queue.min_walltime} to {queue.max_walltime or 'any time'}"
    return f"{limits} up to {queue.max_walltime}" if queue.max_walltime else limits
