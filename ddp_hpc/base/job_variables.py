"""The environment variables with which schedulers describe a job, as one table.

Discovery, rendezvous, torchrun and `ddp_hpc.schedulers` read it, so all of them know a new scheduler's jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.record import record

SIMULATED_NODE = "DDP_HPC_SIMULATED_NODE"
"""The node of a rank in a rehearsal, in which all nodes are this machine."""
DOWN_NODES = "DDP_HPC_DOWN_NODES"
"""In a rehearsal, a directory with a file for each node that is down."""


@record
class JobVariables:
    """The variables of one scheduler; empty if it does not set such a variable.

    `start` differs between the starts of a job that is requeued. `end_s` is the end of the job in seconds
    since the Unix epoch. One of `array_indices` is the index in a job array. `node_file` is the path of a
    file with the nodes of the job, in which each node has one or several lines. `node_lists` are the nodes
    in Slurm's notation, such as `n[1-2,5]`; the first one that is set counts.
    """

    job_id: str = ""
    start: str = ""
    end_s: str = ""
    array_indices: tuple[str, ...] = ()
    node_file: str = ""
    node_lists: tuple[str, ...] = ()


JOB_VARIABLES: dict[str, JobVariables] = {
    "slurm": JobVariables(
        job_id="SLURM_JOB_ID",
        start="SLURM_RESTART_COUNT",
        end_s="SLURM_JOB_END_TIME",
        array_indices=("SLURM_ARRAY_TASK_ID",),
        node_lists=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
    ),
    "pbs": JobVariables(
        job_id="PBS_JOBID",
        start="PBS_JOBCOOKIE",
        array_indices=("PBS_ARRAY_INDEX", "PBS_ARRAYID"),  # PBS_ARRAYID is the name in Torque
        node_file="PBS_NODEFILE",
    ),
}
"""The variables by the name of the scheduler, as in profiles. If several have a job, the first one counts."""


def job_id_of(environ: Mapping[str, str]) -> str:
    """Returns the ID of the job in which this process runs; empty outside a job."""
    return next((environ[row.job_id] for row in JOB_VARIABLES.values() if environ.get(row.job_id)), "")


def node_file_variable(environ: Mapping[str, str]) -> str:
    """Returns the name of the variable with the path of this job's node file; empty if none is set."""
    names = (row.node_file for row in JOB_VARIABLES.values())
    return next((name for name in names if environ.get(name)), "")


def read_node_file(environ: Mapping[str, str]) -> Counter[str]:
    """Returns the number of lines of each node in this job's node file, in its order; empty without a file.

    Raises:
        RequestError: the file cannot be read, or is empty.
    """
    if not (variable := node_file_variable(environ)):
        return Counter()
    lines, problem = [], "contains no host names"
    try:
        lines = Path(environ[variable]).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read ({error}), but it must name the nodes of the job"
    if not lines:
        raise RequestError(f"{variable}={environ[variable]} {problem}. Run this on the job's first node.")
    return Counter(lines)


def node_file_hosts(environ: Mapping[str, str]) -> list[str]:
    """Returns the nodes in this job's node file, in its order; empty if it cannot be read."""
    try:
        return list(read_node_file(environ))
    except RequestError:
        return []
