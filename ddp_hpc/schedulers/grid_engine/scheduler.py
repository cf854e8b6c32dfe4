"""Support for Grid Engine: the directives of job scripts."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_hpc.errors import RequestError, nearest
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.base import Directives, Scheduler, refuse_unused, resource_values
from ddp_hpc.sites.site import Site, queue_entries


class GridEngine(Scheduler):
    """Grid Engine. At the end of h_rt it sends SIGKILL without a warning (queue_conf.5)."""

    name = "age"
    title = "Grid Engine"
    template = "age.sh.j2"
    submit_program = "qsub"
    launchers = ("mpiexec",)
    kill_delay_s = 1
    array_index_variables = ("SGE_TASK_ID",)
    mpiexec_needs_hosts = True
    is_account_on_command_line = True

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        refuse_unused(site, [("--filesystems", job.filesystems)])
        # At these sites a queue is a type of node, and the profile has the resources that select it.
        if layout.queue and not queue_entries(site, layout.queue):
            known = list(dict.fromkeys(entry.name for entry in site.queues))
            raise RequestError(
                f"queue {layout.queue!r} is not known{nearest(layout.queue, known)}. {site.title} has "
                f"{', '.join(known)}."
            )
        return {
            **super().directives(job, site, layout),
            "resources": resource_values(job, site, layout, site.age.resources),
            "options": site.age.options,
        }

    def job_id(self, environ: Mapping[str, str]) -> str:
        return environ.get("JOB_ID") or super().job_id(environ)


SCHEDULER = GridEngine()
