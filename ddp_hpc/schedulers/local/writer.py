"""Job scripts for a machine without a scheduler, which run immediately."""

from __future__ import annotations

from ddp_hpc.base.errors import RequestError
from ddp_hpc.request.job import DEFAULT_MAX_ATTEMPTS, DEFAULT_RESTARTS, Job
from ddp_hpc.request.queue_options import QUEUE_OPTIONS
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.directive_values import Directives, refuse_unused
from ddp_hpc.schedulers.writer import ScriptWriter
from ddp_hpc.sites.site import Site


class LocalWriter(ScriptWriter):
    """Writes directives for a machine without a scheduler."""

    template = "local.sh.j2"
    launchers = ("mpiexec", "torchrun")
    queue_options = frozenset()
    instead_of = dict.fromkeys(
        QUEUE_OPTIONS,
        "without a scheduler a job starts at once on this machine. Remove the option, or choose a profile "
        "with a scheduler.",
    )

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        if job.num_nodes != 1:
            raise RequestError(
                f"{job.num_nodes} nodes were requested, but profile {site.name} consists of this machine "
                "only. Remove --nodes, or choose a profile with a scheduler."
            )
        attempts = str(job.max_attempts) if job.max_attempts != DEFAULT_MAX_ATTEMPTS else ""
        restarts = str(job.restarts) if job.restarts != DEFAULT_RESTARTS else ""
        given = [
            ("--queue", job.queue),
            ("--account", job.account),
            ("--max-attempts", attempts),
            ("--restarts", restarts),
            ("--spare-nodes", str(job.spare_nodes or "")),
            ("--min-nodes", str(job.min_nodes or "")),
            ("--idle-timeout", str(job.idle_timeout_s or "")),
            ("--rank-logs", "1" if job.rank_logs else ""),
        ]
        refuse_unused(site, [*given, ("--filesystems", job.filesystems)])
        return {}


ROLE = LocalWriter
