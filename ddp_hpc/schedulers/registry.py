"""The objects of all schedulers, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.base.job_variables import JOB_VARIABLES
from ddp_hpc.base.mesh_sizes import parse_mesh
from ddp_hpc.request.job import Job
from ddp_hpc.request.program import program_of
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.scheduler import Scheduler
from ddp_hpc.sites.site import Site

_ALL = (
    Scheduler(
        name="slurm",
        title="Slurm",
        submit_program="sbatch",
        prefix="#SBATCH",
        query_command="scontrol",
        roles=("writer", "reader", "commands", "inside_job"),
    ),
    Scheduler(
        name="pbs",
        title="PBS",
        submit_program="qsub",
        prefix="#PBS",
        query_command="qstat",
        roles=("writer", "reader", "commands", "inside_job"),
    ),
    Scheduler(
        name="local",
        title="profile local",
        submit_program="bash",
        has_queue=False,
        roles=("writer",),
    ),
)
SCHEDULERS: dict[str, Scheduler] = {scheduler.name: scheduler for scheduler in _ALL}
"""All schedulers by name. If several have commands on the PATH, the first one is used."""

MONITORED: dict[str, Scheduler] = {
    name: scheduler for name, scheduler in SCHEDULERS.items() if scheduler.query_command
}
"""The schedulers whose jobs can be submitted and monitored, by name."""

NO_SCHEDULER: Scheduler = SCHEDULERS["local"]
"""The object for scripts without directives, which run without a scheduler."""


def scheduler_of_site(site: Site) -> Scheduler:
    """Returns the site's scheduler.

    Raises:
        RequestError: the profile contains an unknown scheduler, or one for which no scripts can be written.
    """
    known = tuple(name for name, scheduler in SCHEDULERS.items() if "writer" in scheduler.roles)
    if site.scheduler not in known:
        problem = f"has the unknown scheduler {site.scheduler!r}{nearest(site.scheduler, known)}"
        if site.scheduler in SCHEDULERS:
            problem = f"is for {SCHEDULERS[site.scheduler].title}, for which ddp-hpc writes no job scripts"
        raise RequestError(f"profile {site.name} {problem}. Use one of {', '.join(known)}.")
    return SCHEDULERS[site.scheduler]


def scheduler_of_job(environ: Mapping[str, str]) -> Scheduler | None:
    """Returns the scheduler in whose job this process runs; None outside a job."""
    names = [name for name, variables in JOB_VARIABLES.items() if environ.get(variables.job_id)]
    return SCHEDULERS[names[0]] if names else None


def is_same_scheduler(site: Site, name: str) -> bool:
    """Returns whether `name` is the name of the site's scheduler."""
    return site.scheduler == name


def check_launch(job: Job, site: Site, layout: Layout) -> None:
    """Checks that the launcher and its options work under the site's scheduler.

    Raises:
        RequestError: the scheduler does not support the launcher or one of its options.
    """
    scheduler = scheduler_of_site(site)
    launchers = scheduler.writer.launchers
    if layout.launcher not in launchers:
        known = tuple(dict.fromkeys(name for other in SCHEDULERS.values() for name in other.writer.launchers))
        if layout.launcher not in known:
            raise RequestError(
                f"unknown launcher {layout.launcher!r}{nearest(layout.launcher, known)}; "
                f"choose one of {', '.join(known)}"
            )
        raise RequestError(
            f"launcher {layout.launcher} does not work under {scheduler.title}. Use {' or '.join(launchers)}."
        )
    if job.min_nodes is not None and (program := program_of(job.command)) and program.is_trainer:
        _check_mesh(job.command, job.min_nodes, job.min_nodes * layout.ranks_per_node)
    if job.qos and (reason := scheduler.writer.refuse_qos(site)):
        raise RequestError(f"--qos {job.qos} was given, but {reason}. Remove --qos.")
    if job.mpi and layout.launcher != "srun":
        raise RequestError(
            f"--mpi {job.mpi} is an option of srun, but the launcher is {layout.launcher}. Remove --mpi."
        )


def _check_mesh(command: Sequence[str], min_nodes: int, num_ranks: int) -> None:
    """Checks that `ddp_hpc.train` can arrange this number of ranks in its --mesh."""
    mesh = re.search(r"(?:^| )--mesh[ =](\S+)", " ".join(command))
    if mesh is not None:
        try:
            parse_mesh(mesh[1], num_ranks)
        except RequestError as error:
            raise RequestError(f"--min-nodes {min_nodes} is not possible: {error}") from None
