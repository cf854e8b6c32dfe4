"""Directives of job scripts for Grid Engine."""

from __future__ import annotations

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.request.job import Job
from ddp_hpc.request.queue_options import (
    mail_points,
    one_range,
    parse_dependency,
    parse_mail_types,
    refuse_index_0,
)
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.directive_values import (
    Directives,
    refuse_unused,
    resource_values,
)
from ddp_hpc.schedulers.writer import ScriptWriter
from ddp_hpc.sites.site import Site, queue_entries

_LACKS = {
    **dict.fromkeys(
        ("mem", "constraint", "exclusive"),
        "Grid Engine supports this only if the site defines a resource for it (qsub -l). Choose the type of "
        "node with --queue, or add the resource to `resources` in a profile of your own.",
    ),
}


class GridEngineWriter(ScriptWriter):
    """Writes directives for Grid Engine."""

    template = "age.sh.j2"
    launchers = ("mpiexec",)
    lacks = _LACKS
    directive_prefix = "#$"
    mpiexec_needs_hosts = True
    is_account_on_command_line = True

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        refuse_unused(site, [("--filesystems", job.filesystems)])
        # Profiles map each queue name to the resources of a node type, so other names cannot be passed on.
        queue = layout.queue.name
        if queue and not queue_entries(site, queue):
            known = list(dict.fromkeys(entry.name for entry in site.queues))
            raise RequestError(
                f"queue {queue!r} is not known{nearest(queue, known)}. {site.title} has the "
                f"queues {', '.join(known)}."
            )
        return {
            **super().directives(job, site, layout),
            "resources": resource_values(job, site, layout, site.age.resources),
            "options": site.age.options,
        }

    def submit_options(self, job: Job, site: Site, layout: Layout) -> list[str]:
        """Returns options of Grid Engine's qsub(1)."""
        found = [f"-ar {job.reservation}"] if job.reservation else []
        for kind, jobs in parse_dependency(job.dependency) if job.dependency else ():
            if kind != "afterany":
                raise RequestError(
                    f"--dependency {job.dependency} was given, but Grid Engine jobs can only wait until "
                    "other jobs have ended, whether or not they failed. Use afterany."
                )
            found.append(f"-hold_jid {','.join(jobs)}")
        if job.mail_user:
            found.append(f"-M {job.mail_user}")
        if job.mail_type:
            found.append(f"-m {mail_points(parse_mail_types(job.mail_type), 'Grid Engine')}")
        if job.array:
            array = one_range(job.array, "Grid Engine")
            refuse_index_0(array, "Grid Engine")
            found += [f"-t {array.text}", *([f"-tc {array.limit}"] if array.limit else [])]
        return found


ROLE = GridEngineWriter
