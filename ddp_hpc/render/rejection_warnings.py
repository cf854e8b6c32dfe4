"""Warnings about jobs that a site's scheduler may reject. These are only warnings, because the queue tables
of a profile can be outdated.
"""

from __future__ import annotations

from pathlib import Path

from ddp_hpc.base.units import counted, format_walltime
from ddp_hpc.render.launch_lines import NOT_CHECKED, launch_words, runs_node_check
from ddp_hpc.render.supervisor_line import resumption_of_job
from ddp_hpc.request.job import DEFAULT_RESTARTS, Job, default_node_check
from ddp_hpc.request.queue_choice import all_limits, called, size_of, takes
from ddp_hpc.request.rank_layout import Layout, lay_out
from ddp_hpc.schedulers.registry import scheduler_of_site
from ddp_hpc.sites.site import Site, queue_entries


def never_resumed(job: Job, site: Site, directory: Path) -> str:
    """Returns that no other job resumes the program of a job, with the remedy; empty if one may."""
    if not scheduler_of_site(site).has_queue:
        return ""
    resumption = resumption_of_job(job, directory)
    warning = resumption.warning(lay_out(job, site).walltime_s)
    return f"{warning}; {resumption.how_to_resume}" if warning else ""


def choices_made(job: Job, site: Site) -> list[str]:
    """Returns one line for each choice that was made for the user, who may want another one."""
    layout = lay_out(job, site)
    lines = [layout.queue.why]
    if job.gpus_per_node is None and layout.devices and not site.node.devices:
        lines.append(f"{counted(layout.devices, 'GPU')} per node; --gpus-per-node requests another number")
    return list(filter(None, lines))


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
    if layout.devices and not (site.node.devices or layout.cpus_per_rank):
        memory = "" if job.mem else " and the default memory of the queue"
        lines.append(
            f"neither profile {site.name} nor {scheduler_of_site(site).title} says how many cores and how "
            f"much memory come with a GPU, so each rank gets one CPU{memory}. Use --cpus-per-node and --mem."
        )
    if job.spare_nodes and job.num_nodes == 1:
        lines.append(
            "with --nodes 1, the spare nodes replace the only node of the ranks if a device fails, but not "
            "if the node dies, because the supervisor runs on it; the scheduler then starts the job again. "
            "Use --nodes 2 or more, or omit --spare-nodes."
        )
    if DEFAULT_RESTARTS != job.restarts >= job.max_attempts:
        lines.append(
            f"--max-attempts {job.max_attempts} also counts restarts, so a job cannot use all of --restarts "
            f"{job.restarts}. Use a larger --max-attempts."
        )
    lines += _without_gpus(job, layout, site)
    if job.idle_timeout_s is not None and layout.walltime_s and job.idle_timeout_s >= layout.walltime_s:
        lines.append(
            f"--idle-timeout {job.idle_timeout_s:g} is not shorter than the walltime, so a hang would never "
            "be noticed. Use a shorter time."
        )
    if job.node_check not in (None, "off") and job.total_nodes == 1:
        lines.append("--node-check has no effect, because nodes are only checked if ranks run on several.")
    elif job.node_check == "replace" and not (job.spare_nodes or job.min_nodes):
        lines.append(
            "with --node-check replace, but without --spare-nodes or --min-nodes, a bad node ends the job "
            "before its ranks start, and another job without this node must wait in the queue. Add one of "
            "these options, or use --node-check warn."
        )
    check = job.node_check or default_node_check(job.spare_nodes)
    if check != "off" and not runs_node_check(launch_words(job, site, layout)[1]):
        lines.append(NOT_CHECKED)
    asks_for_none = job.gpus_per_node == 0 or site.node.cpu_only
    if scheduler_of_site(site).has_queue and not layout.devices and not asks_for_none:
        lines.append(
            f"profile {site.name} defines no GPUs, so none are requested. Use --gpus-per-node to "
            "request GPUs."
        )
    return lines


def _without_gpus(job: Job, layout: Layout, site: Site) -> list[str]:
    """Returns a warning if a job without GPUs gets a queue and nodes that the profile lists for GPUs."""
    name = layout.queue.name
    # Without a name, the scheduler chooses among the queues to which users do not submit.
    chosen = [entry for entry in site.queues if (entry.name == name if name else not entry.submit)]
    for_cpus = any(entry.cpu_only for entry in chosen)
    if job.gpus_per_node != 0 or not (site.node.devices or site.node.device) or for_cpus or job.queue:
        return []
    queue = f"queue {name}" if name else "the default queue"
    constraint = site.slurm.constraint if not job.constraint else ""
    where = f"{queue} with constraint {constraint}" if constraint else queue
    remedy = " and --constraint" if constraint else ""
    return [
        f"profile {site.name} describes nodes with GPUs, and {where} may reject a job without GPUs or charge "
        f"it for them. Name where such jobs run with --queue{remedy}."
    ]


def _queue_advice(job: Job, layout: Layout, site: Site) -> list[str]:
    """Returns a warning if the user chose a queue that does not take the job; others are chosen by limits."""
    if not ((job.queue or job.qos) and site.queues):
        return []
    queue = f"queue {layout.queue.name}" + (f" with QOS {job.qos}" if job.qos else "")
    entries = queue_entries(site, layout.queue.name, job.qos)
    if not entries:
        names = dict.fromkeys(called(entry) for entry in site.queues if entry.name)
        known = f" (known: {', '.join(names)})" if names else ""
        return [
            f"{site.title} had no {queue} when the profile was checked on {site.checked}{known}. "
            "Check its name."
        ]
    sizes = [
        (entry, size_of(job, site, entry, layout.ranks_per_node, layout.devices, layout.walltime_s))
        for entry in entries
    ]
    if any(takes(entry, size) for entry, size in sizes):
        return []
    limits = all_limits(entries)
    limited = max((size.num_devices for entry, size in sizes if entry.max_devices), default=0)
    gpus = f" with {limited} GPUs" if limited else ""
    walltime = format_walltime(layout.walltime_s or 0)
    return [
        f"{counted(job.total_nodes, 'node')}{gpus} for {walltime} exceed the limits of {queue} on "
        f"{site.checked} ({limits}), so the scheduler may reject the job"
    ]
