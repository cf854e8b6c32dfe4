"""Directives of job scripts for PBS."""

from __future__ import annotations

import re

from ddp_hpc.base.errors import RequestError
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.directive_values import (
    Directives,
    optional_value,
    resource_values,
)
from ddp_hpc.schedulers.pbs.submit_options import LACKS, submit_options, with_memory
from ddp_hpc.schedulers.writer import ScriptWriter
from ddp_hpc.sites.site import Site

# Older servers truncate or reject longer names.
MAX_NAME_CHARS = 15
# The default of PBS, 077, hides the results from the other members of the project.
UMASK = "-W umask=022"


class PbsWriter(ScriptWriter):
    """Writes directives for PBS."""

    template = "pbs.sh.j2"
    launchers = ("mpiexec", "torchrun")
    first_node_in_shell = '$(head -n 1 "$PBS_NODEFILE")'
    job_number_in_shell = "(${PBS_JOBID%%[!0-9]*} + ${PBS_ARRAY_INDEX:-0})"
    agent_launcher = "mpiexec"
    why_omp_num_threads = "PBS would set this to the number of cores of the whole node, for each rank."
    lacks = LACKS

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        if len(job.name) > MAX_NAME_CHARS:
            raise RequestError(
                f"job name {job.name!r} has {len(job.name)} characters, but PBS accepts at most "
                f"{MAX_NAME_CHARS}. Use a shorter name."
            )
        resources = resource_values(job, site, layout, site.pbs.resources)
        if job.exclusive:
            if not any(text.startswith("select=") for text in resources):
                raise RequestError(
                    f"--exclusive was given, but jobs for {site.title} request CPUs without chunks (select), "
                    "and PBS reserves whole nodes only for chunks. Remove --exclusive."
                )
            resources = [text for text in resources if not text.startswith("place=")]
        return {
            **super().directives(job, site, layout),
            "resources": with_memory(resources, job) if job.mem else resources,
            "filesystems_resource": site.pbs.filesystems_resource,
            "filesystems": optional_value("filesystems", job.filesystems or site.pbs.filesystems),
            "options": [*site.pbs.options, UMASK],
            "variables": profile_variables(site),
        }

    def submit_options(self, job: Job, site: Site, layout: Layout) -> list[str]:
        return submit_options(job)


ROLE = PbsWriter


def profile_variables(site: Site) -> str:
    """Returns the variables in the `-v` options of the profile, as `A=1,B=2`.

    The option -v of qsub replaces the -v in a directive, so it must repeat these variables.
    """
    return ",".join(re.findall(r"(?:^| )-v *(\S+)", " ".join(site.pbs.options)))
