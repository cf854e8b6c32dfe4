"""Support for Grid Engine: directives and requests of its scripts."""

from __future__ import annotations

from ddp_hpc.errors import RequestError, nearest
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.base import (
    Directives,
    Scheduler,
    directive_value,
    optional_value,
    refuse_unused,
    resource_values,
    walltime_of,
)
from ddp_hpc.sites.site import Site, queue_entries


class GridEngine(Scheduler):
    """Grid Engine. At the end of h_rt it sends SIGKILL without a warning (queue_conf.5)."""

    name = "age"
    title = "Grid Engine"
    template = "age.sh.j2"
    submit_program = "qsub"
    launchers = ("mpiexec",)
    kill_delay_s = 1
    mpiexec_needs_hosts = True
    is_account_on_command_line = True

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        refuse_unused(site, [("--filesystems", job.filesystems)])
        # On these sites a queue is a type of node, and the resources select it.
        if layout.queue and not queue_entries(site, layout.queue):
            known = list(dict.fromkeys(entry.name for entry in site.queues))
            raise RequestError(
                f"queue {layout.queue!r} is not known{nearest(layout.queue, known)}. {site.title} has "
                f"{', '.join(known)}."
            )
        optional_value("account", job.account)  # a comment shows it on qsub's command line
        return {
            "name": directive_value("job name", job.name),
            "resources": resource_values(job, site, layout, site.age.resources),
            "walltime": walltime_of(layout, site),
            "options": site.age.options,
        }


SCHEDULER = GridEngine()
