"""The objects of all schedulers, by name."""

from __future__ import annotations

from importlib import import_module

from ddp_hpc.errors import RequestError, nearest
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.base import Scheduler
from ddp_hpc.sites.site import Site

# Each of these directories has a module `scheduler` with the object SCHEDULER. If several schedulers have
# commands in the same directory of the PATH, the first one in this list is used.
_DIRECTORIES = ("slurm", "pbs", "flux", "grid_engine", "local")
_MODULES = [import_module(f"ddp_hpc.schedulers.{directory}.scheduler") for directory in _DIRECTORIES]
SCHEDULERS: dict[str, Scheduler] = {module.SCHEDULER.name: module.SCHEDULER for module in _MODULES}

MONITORED: dict[str, Scheduler] = {name: one for name, one in SCHEDULERS.items() if one.query_command}
"""The schedulers whose jobs can be submitted and monitored, by name."""

NO_SCHEDULER: Scheduler = SCHEDULERS["local"]
"""The object for scripts without directives, which run without a scheduler."""


def scheduler_of_site(site: Site) -> Scheduler:
    """Returns the site's scheduler.

    Raises:
        RequestError: the profile contains an unknown scheduler.
    """
    if site.scheduler not in SCHEDULERS:
        known = tuple(SCHEDULERS)
        raise RequestError(
            f"profile {site.name} has the unknown scheduler {site.scheduler!r}"
            f"{nearest(site.scheduler, known)}. Use one of {', '.join(known)}."
        )
    return SCHEDULERS[site.scheduler]


def is_same_scheduler(site: Site, name: str) -> bool:
    """Returns whether `name` is the name of the site's scheduler."""
    return site.scheduler == name


def check_launch(job: Job, site: Site, layout: Layout) -> None:
    """Checks that the launcher and its options work under the site's scheduler.

    Raises:
        RequestError: the scheduler does not support the launcher or one of its options.
    """
    scheduler = scheduler_of_site(site)
    known = tuple(dict.fromkeys(name for one in SCHEDULERS.values() for name in one.launchers))
    if layout.launcher not in known:
        raise RequestError(
            f"unknown launcher {layout.launcher!r}{nearest(layout.launcher, known)}; "
            f"choose one of {', '.join(known)}"
        )
    if layout.launcher not in scheduler.launchers:
        raise RequestError(
            f"launcher {layout.launcher} does not work under {scheduler.title}. Use "
            f"{' or '.join(scheduler.launchers)}."
        )
    if job.min_nodes and layout.launcher != "torchrun":
        raise RequestError(
            f"--min-nodes {job.min_nodes} was given, but the launcher is {layout.launcher}, and only "
            "torchrun can continue with fewer nodes. Use --launcher torchrun."
        )
    if job.qos and (reason := scheduler.refuse_qos(site)):
        raise RequestError(f"--qos {job.qos} was given, but {reason}. Remove --qos.")
    if job.mpi and layout.launcher != "srun":
        raise RequestError(
            f"--mpi {job.mpi} is an option of srun, but the launcher is {layout.launcher}. Remove --mpi."
        )
