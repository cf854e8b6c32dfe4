"""Directives of job scripts for Flux."""

from __future__ import annotations

from ddp_hpc.request.job import Job
from ddp_hpc.request.queue_options import parse_dependency
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.directive_values import (
    Directives,
    refuse_unused,
)
from ddp_hpc.schedulers.writer import ScriptWriter
from ddp_hpc.sites.site import Site

_LACKS = {
    "mem": "Flux allocates whole nodes with their memory. Remove --mem.",
    "reservation": "Flux has no reservations; sites provide a queue instead. Use --queue.",
    "array": "flux batch has no arrays. Submit one script per task, each with its own --run-dir.",
    **dict.fromkeys(("mail_user", "mail_type"), "Flux sends no mail. Remove --mail-user and --mail-type."),
}


class FluxWriter(ScriptWriter):
    """Writes directives for Flux.

    The scripts always request whole nodes (--exclusive).
    """

    template = "flux.sh.j2"
    launchers = ("flux",)
    lacks = _LACKS
    directive_prefix = "#flux:"
    named_in_value = frozenset(("--setattr", "--setopt"))

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        refuse_unused(site, [("--filesystems", job.filesystems)])
        return {
            **super().directives(job, site, layout),
            "nodes": str(job.num_nodes),
            # Flux accepts a walltime as a number with a unit (RFC 23), and rejects HH:MM:SS.
            "walltime": f"{layout.walltime_s}s",
            "options": site.flux.options,
        }

    def submit_options(self, job: Job, site: Site, layout: Layout) -> list[str]:
        """Returns options of flux-batch(1)."""
        found = [f"--requires={job.constraint}"] if job.constraint else []
        for kind, jobs in parse_dependency(job.dependency) if job.dependency else ():
            found += [f"--dependency={kind}:{one}" for one in jobs]
        return found

    def account_placeholder(self, site: Site) -> str:
        return "--setattr=bank=PROJECT"


ROLE = FluxWriter
