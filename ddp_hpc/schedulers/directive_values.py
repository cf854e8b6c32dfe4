"""The values of the directives of a rendered script, and checks of the text in them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import format_walltime
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.sites.site import Site, queue_entries

Directives = dict[str, str | Sequence[str]]
"""The values of directives; the keys are the variable names in the templates of job scripts."""

_VALUE = r"[A-Za-z0-9][A-Za-z0-9_.:@+,=&|/()*-]*"

# The `select` request for profiles that do not define `resources`: one chunk per node.
_CHUNK, _GPUS, _MEMORY = (
    "select={nodes}:ncpus={cpus}:mpiprocs={ranks}",
    ":ngpus={devices}",
    ":mem={memory_mib}mb",
)


def directive_value(what: str, value: str) -> str:
    """Returns `value` if it can be written into a directive line.

    A directive is not shell code: the scheduler reads it to the end of the line without expanding anything.
    Therefore, values are checked instead of quoted.

    Raises:
        RequestError: `value` contains blanks, line breaks, quotes, `$` or other characters that are not
            allowed.
    """
    if not re.fullmatch(_VALUE, value):
        raise RequestError(
            f"{what} {value!r} cannot be written into a directive. Use letters, digits and _.:@+,=&|/()*- "
            "without blanks or quotes."
        )
    return value


def optional_value(what: str, value: str) -> str:
    """Returns `value` like `directive_value`, but also accepts an empty value."""
    return directive_value(what, value) if value else ""


def walltime_of(layout: Layout, site: Site) -> str:
    """Returns the walltime of the job, or otherwise the default of the site, as HH:MM:SS.

    Raises:
        RequestError: neither of them is set.
    """
    if layout.walltime_s is None:
        raise RequestError(f"no walltime was given and {site.title} has no default. Use --walltime HH:MM:SS.")
    return format_walltime(layout.walltime_s)


def refuse_unused(site: Site, given: Sequence[tuple[str, str]]) -> None:
    """Rejects options that this scheduler cannot use.

    `given` has these options and their values; an empty value means that the option was not given.

    Raises:
        RequestError: one of the options was given.
    """
    for option, value in given:
        if value:
            raise RequestError(
                f"{option} {value} was given, but the scheduler of profile {site.name} has no such option. "
                f"Remove {option}."
            )


def resource_values(job: Job, site: Site, layout: Layout, of_site: Sequence[str]) -> list[str]:
    """Returns the values of qsub -l for this job, as defined by its queue or otherwise by its site."""
    of_queue = next((queue.resources for queue in queue_entries(site, layout.queue.name)), ())
    resources = of_queue or of_site or (_CHUNK + _GPUS * (layout.devices > 0) + _MEMORY,)
    cpus = job.cpus_per_node or site.node.threads or site.node.cores
    cpus = cpus or layout.cpus_per_rank * layout.ranks_per_node or layout.ranks_per_node
    per_node = {
        "ranks": layout.ranks_per_node,
        "devices": layout.devices,
        "cpus": cpus,
        "memory_mib": layout.memory_mib,
    }
    all_nodes = {f"all_{name}": job.total_nodes * number for name, number in per_node.items()}
    numbers = {"nodes": job.total_nodes, **per_node, **all_nodes}
    # With 0, the amount of memory is unknown, or the option --mem replaces it.
    values = [text.format_map(numbers).replace(":mem=0mb", "") for text in resources]
    return [directive_value("resource", text) for text in values if text != "mem=0mb"]


def cpus_per_task(layout: Layout) -> int:
    """Returns the CPUs per Slurm task. A task is one rank, or with torchrun the agent for a whole node."""
    per_rank = layout.cpus_per_rank or 1
    return per_rank * layout.ranks_per_node if layout.launcher == "torchrun" else per_rank
