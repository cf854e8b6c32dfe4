"""The schedulers: which template, which launchers, and how a value of a directive is spelled.

A directive line is not shell: PBS and Slurm read it to the end of the line and
expand nothing. So values are checked here, never quoted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_hpc.batch.job import DEFAULT_MAX_ATTEMPTS, Job
from ddp_hpc.batch.layout import Layout
from ddp_hpc.batch.site import Site, queue_entries
from ddp_hpc.errors import RequestError, nearest
from ddp_hpc.units import format_walltime

# Older PBS servers cut or refuse longer names.
PBS_MAX_NAME_CHARS = 15

_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@+,=&|/()*-]*")

# A chunk for each node; no more is known of a site that says nothing.
_CHUNK = "select={nodes}:ncpus={cpus}:mpiprocs={ranks}"

Directives = dict[str, str | Sequence[str]]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Scheduler:
    """One way to run a script. `kill_delay_s` is the usual time from SIGTERM to SIGKILL at the end of a job.

    `kill_delay_s` is 10 for PBS (server default of kill_delay) and 30 for Slurm
    (default of KillWait), next to nothing for Grid Engine, whose h_rt is a SIGKILL
    (queue_conf.5), and 0 for Flux, of which it is not known; a profile may know better.
    With `goes_on` a script can have itself run again.
    """

    template: str
    submit: str
    launchers: tuple[str, ...]
    kill_delay_s: int
    goes_on: bool
    directives: Callable[[Job, Site, Layout], Directives]


def scheduler_of(job: Job, site: Site, layout: Layout) -> Scheduler:
    """The site's scheduler.

    Raises:
        RequestError: an unknown scheduler, or a launcher that does not work under it.
    """
    if site.scheduler not in SCHEDULERS:
        known = tuple(SCHEDULERS)
        raise RequestError(
            f"profile {site.name} names scheduler {site.scheduler!r}{nearest(site.scheduler, known)}; "
            f"use one of {', '.join(known)}"
        )
    scheduler = SCHEDULERS[site.scheduler]
    if layout.launcher not in scheduler.launchers:
        raise RequestError(
            f"launcher {layout.launcher} was asked for; under {site.scheduler} there is "
            f"{' or '.join(scheduler.launchers)}; choose one of these"
        )
    if job.min_nodes and layout.launcher != "torchrun":
        raise RequestError(
            f"--min-nodes {job.min_nodes} was given; only torchrun goes on with fewer nodes and "
            f"{layout.launcher} starts the ranks; use --launcher torchrun"
        )
    if job.qos:
        _check_qos(job, site)
    if job.mpi and layout.launcher != "srun":
        raise RequestError(
            f"--mpi {job.mpi} is an option of srun, but {layout.launcher} starts the ranks; leave it out"
        )
    return scheduler


def _check_qos(job: Job, site: Site) -> None:
    if site.scheduler != "slurm":
        reason = f"a QOS is asked of Slurm, and {site.title} has {site.scheduler}"
    elif site.slurm.queue_option == "qos":
        reason = f"at {site.title} --queue is the QOS"
    elif "--qos" in site.slurm.forbidden:
        reason = f"{site.title} refuses it"
    else:
        return
    raise RequestError(f"--qos {job.qos} was given; {reason}; leave it out")


def directive_value(what: str, value: str) -> str:
    """`value`, fit for a directive line.

    Raises:
        RequestError: blanks, line breaks, quotes, `$` and whatever else no scheduler takes in a name.
    """
    if not _VALUE.fullmatch(value):
        raise RequestError(
            f"{what} {value!r} was given; directives take letters, digits and _.:@+,=&|/()*- without "
            "blanks or quotes; mend it"
        )
    return value


def _optional(what: str, value: str) -> str:
    return directive_value(what, value) if value else ""


def _walltime(layout: Layout, site: Site) -> str:
    if layout.walltime_s is None:
        raise RequestError(f"no walltime was given and {site.title} has no default; use --walltime HH:MM:SS")
    return format_walltime(layout.walltime_s)


def _pbs(job: Job, site: Site, layout: Layout) -> Directives:
    if len(job.name) > PBS_MAX_NAME_CHARS:
        raise RequestError(
            f"job name {job.name!r} has {len(job.name)} characters; PBS takes {PBS_MAX_NAME_CHARS}; "
            "shorten it"
        )
    return {
        "name": directive_value("job name", job.name),
        "resources": [directive_value("resource", text) for text in _resources(job, site, layout)],
        "walltime": _walltime(layout, site),
        "filesystems_resource": site.pbs.filesystems_resource,
        "filesystems": _optional("filesystems", job.filesystems or site.pbs.filesystems),
        "queue": _optional("queue", layout.queue),
        "account_option": site.account.option,
        "account": _optional("account", job.account),
        "options": site.pbs.options,
        "variables": pbs_variables(site),
    }


def pbs_variables(site: Site) -> str:
    """What the profile's own `-v` hands to a job, as `A=1,B=2`.

    A `-v` on qsub's command line takes the place of the script's, so it has to say this again.
    """
    return ",".join(re.findall(r"(?:^| )-v *(\S+)", " ".join(site.pbs.options)))


def _resources(job: Job, site: Site, layout: Layout) -> list[str]:
    """The values of qsub's -l with this job's numbers."""
    cpus = job.cpus_per_node or site.node.threads or site.node.cores or layout.ranks_per_node
    numbers = {
        "nodes": job.num_nodes,
        "ranks": layout.ranks_per_node,
        "devices": layout.devices,
        "cpus": cpus,
        "all_ranks": job.num_nodes * layout.ranks_per_node,
        "all_devices": job.num_nodes * layout.devices,
        "all_cpus": job.num_nodes * cpus,
    }
    of_queue = next((queue.resources for queue in queue_entries(site, layout.queue)), ())
    of_site = site.age.resources if site.scheduler == "age" else site.pbs.resources
    resources = of_queue or of_site or (_CHUNK + (":ngpus={devices}" if layout.devices else ""),)
    return [text.format_map(numbers) for text in resources]


def _slurm(job: Job, site: Site, layout: Layout) -> Directives:
    _refuse_unread(site, [("--filesystems", job.filesystems)])
    if not site.slurm.queue_option:
        _refuse_unread(site, [("--queue", job.queue)])
    # One agent of torchrun a node has all its CPUs; otherwise each rank is a task.
    per_node = 1 if layout.launcher == "torchrun" else layout.ranks_per_node
    return {
        "name": directive_value("job name", job.name),
        "nodes": str(job.num_nodes),
        "tasks_per_node": str(per_node),
        "cpus_per_task": str(cpus_per_task(layout)),
        "gpus": _gpus(site, layout),
        "walltime": _walltime(layout, site),
        "account": _optional("account", job.account),
        "queue_option": site.slurm.queue_option,
        "queue": _optional("queue", layout.queue if site.slurm.queue_option else ""),
        "qos": _optional("QOS", job.qos)
        or next((entry.qos for entry in queue_entries(site, layout.queue)), ""),
        "constraint": _optional("constraint", site.slurm.constraint),
        "options": site.slurm.options,
    }


def _gpus(site: Site, layout: Layout) -> str:
    """The option that asks for a node's GPUs; nothing where nodes come whole."""
    option = site.slurm.gpu_option
    if not layout.devices or not option:
        return ""
    named = f"{site.slurm.gpu_type}:{layout.devices}" if site.slurm.gpu_type else str(layout.devices)
    return f"--gres=gpu:{named}" if option == "gres" else f"--gpus-per-node={named}"


def cpus_per_task(layout: Layout) -> int:
    """CPUs of one Slurm task: one rank's, or one node's where the task is torchrun's agent."""
    per_rank = layout.cpus_per_rank or 1
    return per_rank * layout.ranks_per_node if layout.launcher == "torchrun" else per_rank


def _flux(job: Job, site: Site, layout: Layout) -> Directives:
    _refuse_unread(site, [("--filesystems", job.filesystems)])
    _walltime(layout, site)
    return {
        "name": directive_value("job name", job.name),
        "nodes": str(job.num_nodes),
        # Flux takes no HH:MM:SS: a number and a unit (RFC 23).
        "walltime": f"{layout.walltime_s}s",
        "queue": _optional("queue", layout.queue),
        "account": _optional("account", job.account),
        "options": site.flux.options,
    }


def _age(job: Job, site: Site, layout: Layout) -> Directives:
    _refuse_unread(site, [("--filesystems", job.filesystems)])
    # A queue is a kind of node here, which the resources name.
    if layout.queue and not queue_entries(site, layout.queue):
        known = list(dict.fromkeys(entry.name for entry in site.queues))
        raise RequestError(
            f"queue {layout.queue!r} is not known{nearest(layout.queue, known)}; {site.title} has "
            f"{', '.join(known)}"
        )
    _optional("account", job.account)  # for the command line of qsub, which a comment shows
    return {
        "name": directive_value("job name", job.name),
        "resources": [directive_value("resource", text) for text in _resources(job, site, layout)],
        "walltime": _walltime(layout, site),
        "options": site.age.options,
    }


def _local(job: Job, site: Site, layout: Layout) -> Directives:
    if job.num_nodes != 1:
        raise RequestError(
            f"{job.num_nodes} nodes were asked for; profile {site.name} is this one machine; "
            "leave --nodes out or choose a profile with a scheduler"
        )
    attempts = str(job.max_attempts) if job.max_attempts != DEFAULT_MAX_ATTEMPTS else ""
    given = [("--queue", layout.queue), ("--account", job.account), ("--max-attempts", attempts)]
    _refuse_unread(site, [*given, ("--filesystems", job.filesystems)])
    return {}


def _refuse_unread(site: Site, given: Sequence[tuple[str, str]]) -> None:
    for option, value in given:
        if value:
            raise RequestError(
                f"{option} {value} was given; profile {site.name} has no scheduler that could use it; "
                "leave it out"
            )


SCHEDULERS = {
    "pbs": Scheduler(
        template="pbs.sh.j2",
        submit="qsub",
        launchers=("mpiexec", "torchrun"),
        kill_delay_s=10,
        goes_on=True,
        directives=_pbs,
    ),
    "slurm": Scheduler(
        template="slurm.sh.j2",
        submit="sbatch",
        launchers=("srun", "mpiexec", "ibrun", "torchrun"),
        kill_delay_s=30,
        goes_on=True,
        directives=_slurm,
    ),
    "flux": Scheduler(
        template="flux.sh.j2",
        submit="flux batch",
        launchers=("flux",),
        kill_delay_s=0,
        goes_on=False,
        directives=_flux,
    ),
    "age": Scheduler(
        template="age.sh.j2",
        submit="qsub",
        launchers=("mpiexec",),
        kill_delay_s=1,
        goes_on=False,
        directives=_age,
    ),
    "local": Scheduler(
        template="local.sh.j2",
        submit="bash",
        launchers=("mpiexec", "torchrun"),
        kill_delay_s=0,
        goes_on=False,
        directives=_local,
    ),
}
