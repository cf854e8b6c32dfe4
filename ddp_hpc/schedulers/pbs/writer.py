"""Directives of job scripts for PBS.

Sources: qsub.1B and pbs_resources.7B, OpenPBS 23.06.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddp_hpc.base.errors import RequestError
from ddp_hpc.request.job import Job
from ddp_hpc.request.queue_options import (
    QUEUE_OPTIONS,
    mail_points,
    one_range,
    parse_mail_types,
    parse_memory,
)
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.directive_values import (
    Directives,
    optional_value,
    resource_values,
)
from ddp_hpc.schedulers.writer import ScriptWriter
from ddp_hpc.sites.site import Site

# Older servers truncate or reject longer names.
MAX_NAME_CHARS = 15
# The default of PBS, 077, hides the results from the other members of the project.
UMASK = "-W umask=022"
_KEEP_WITHOUT_NODE = "-W tolerate_node_failures=all"
_INSTEAD_OF = {
    "constraint": "PBS has no constraints; it selects nodes by resources of a chunk, such as gpu_type=a100. "
    "Add them to `resources` in a profile of your own (ddp-hpc profiles show).",
    "reservation": "PBS provides a reservation as a queue. Use --queue, such as --queue R123.",
}


class PbsWriter(ScriptWriter):
    """Writes directives for PBS."""

    template = "pbs.sh.j2"
    launchers = ("mpiexec", "torchrun")
    agent_launcher = "mpiexec"
    why_omp_num_threads = "PBS would set this to the number of cores of the whole node, for each rank."
    may_lose_nodes = True
    queue_options = frozenset(QUEUE_OPTIONS) - set(_INSTEAD_OF)
    instead_of = _INSTEAD_OF

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        if len(job.name) > MAX_NAME_CHARS:
            raise RequestError(
                f"job name {job.name!r} has {len(job.name)} characters, but PBS accepts at most "
                f"{MAX_NAME_CHARS}. Use a shorter name."
            )
        if job.node_loss_option:
            _check_node_loss(job, site)
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
            "resources": _with_memory(resources, job) if job.mem else resources,
            "filesystems_resource": site.pbs.filesystems_resource,
            "filesystems": optional_value("filesystems", job.filesystems or site.pbs.filesystems),
            "options": [*site.pbs.options, UMASK, *([_KEEP_WITHOUT_NODE] if job.node_loss_option else [])],
            "variables": profile_variables(site),
        }

    def submit_options(self, job: Job, site: Site, layout: Layout) -> list[str]:
        """Returns the options of qsub, except the memory, which is a resource of the chunks."""
        options = []
        if job.exclusive:
            # A host can consist of several vnodes; `excl` would reserve only those that the job uses.
            options.append("-l place=scatter:exclhost")
        if job.dependency:
            options.append(f"-W depend={job.dependency}")
        if job.mail_user:
            options.append(f"-M {job.mail_user}")
        if job.mail_type:
            options.append(f"-m {mail_points(parse_mail_types(job.mail_type), 'PBS')}")
        if job.array:
            array = one_range(job.array, "PBS")
            options.append(f"-J {array.text}{f'%{array.limit}' if array.limit else ''}")
        return options


ROLE = PbsWriter


def _check_node_loss(job: Job, site: Site) -> None:
    given = f"{job.node_loss_option} was given, but"
    if not site.pbs.tolerate_node_failures:
        raise RequestError(
            f"{given} profile {site.name} does not say that jobs may lose nodes. If {site.title} accepts "
            "qsub -W tolerate_node_failures=all, set tolerate_node_failures = true in [pbs] of a profile of "
            "your own (ddp-hpc profiles show)."
        )
    if site.launch.dialect == "openmpi":
        raise RequestError(
            f"{given} the mpiexec of {site.title} is that of Open MPI, which cannot leave nodes of a PBS job "
            "out. Omit the option."
        )


def profile_variables(site: Site) -> str:
    """Returns the variables in the `-v` options of the profile, as `A=1,B=2`.

    The option -v of qsub replaces the -v in a directive, so it must repeat these variables.
    """
    return ",".join(re.findall(r"(?:^| )-v *(\S+)", " ".join(site.pbs.options)))


def _with_memory(resources: Sequence[str], job: Job) -> list[str]:
    """Returns the values of `-l`, to which the memory per node (--mem) is added.

    Raises:
        RequestError: PBS cannot reserve this memory per node.
    """
    if job.mem == "0":
        raise RequestError(
            "--mem 0 was given, but PBS cannot request the whole memory of a node. Give a size, such as "
            "--mem 64G."
        )
    number, unit = parse_memory(job.mem)
    requests = []
    for text in resources:
        chunk = re.fullmatch(r"select=([0-9]+)((?::[^:+]+)*)", text)
        if chunk and int(chunk[1]) == job.total_nodes:
            others = re.sub(r":mem=[^:]*", "", chunk[2])
            requests.append(f"select={chunk[1]}{others}:mem={number}{unit.lower()}b")
        elif text.startswith("mem="):  # without chunks, mem is the memory of the whole job
            requests.append(f"mem={number * job.total_nodes}{unit.lower()}b")
        else:
            requests.append(text)
    if requests == list(resources) and not any(f":mem={number}{unit.lower()}b" in text for text in requests):
        raise RequestError(
            f"--mem {job.mem} was given, but this profile does not request one chunk per node, so the memory "
            "per node cannot be set. Set mem in `resources` of a profile of your own."
        )
    return requests
