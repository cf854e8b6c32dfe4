"""Support for Flux: directives and requests of its scripts."""

from __future__ import annotations

from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.base import (
    Directives,
    Scheduler,
    directive_value,
    optional_value,
    refuse_unused,
    walltime_of,
)
from ddp_hpc.sites.site import Site


class Flux(Scheduler):
    """Flux."""

    name = "flux"
    title = "Flux"
    template = "flux.sh.j2"
    submit_program = "flux batch"
    launchers = ("flux",)

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        refuse_unused(site, [("--filesystems", job.filesystems)])
        walltime_of(layout, site)
        return {
            "name": directive_value("job name", job.name),
            "nodes": str(job.num_nodes),
            # Flux accepts a walltime as a number with a unit (RFC 23), and rejects HH:MM:SS.
            "walltime": f"{layout.walltime_s}s",
            "queue": optional_value("queue", layout.queue),
            "account": optional_value("account", job.account),
            "options": site.flux.options,
        }

    def account_placeholder(self, site: Site) -> str:
        return "--setattr=bank=PROJECT"


SCHEDULER = Flux()
