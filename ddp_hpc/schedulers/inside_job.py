"""The role of a scheduler that describes the job in which this process runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from ddp_hpc.base.job_variables import JOB_VARIABLES, JobVariables, read_node_file

if TYPE_CHECKING:
    from ddp_hpc.schedulers.allocation import Allocation
    from ddp_hpc.schedulers.running_job import RunningJob
    from ddp_hpc.schedulers.scheduler import Scheduler


class InsideJob:
    """Knows the job of this process. The defaults suffice if `ddp_hpc.base.job_variables` says everything."""

    can_requeue: ClassVar[bool] = False
    """Whether a script can requeue or resubmit itself at the end of its walltime."""
    kill_delay_s: ClassVar[int] = 0
    """The usual time between SIGTERM and SIGKILL at the end of a job; 0 if unknown."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.variables = JOB_VARIABLES.get(scheduler.name, JobVariables())

    def find_allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """Returns the allocation of which this process is a part; None if the nodes are unknown.

        By default, they are those of the node file, in which a node has a line per task (PBS: `mpiprocs`).

        Raises:
            RequestError: the scheduler's variables are invalid.
        """
        from ddp_hpc.schedulers.allocation import Allocation

        if not environ.get(self.variables.node_file):
            return None
        lines = read_node_file(environ)
        return Allocation(
            scheduler=self.scheduler.name,
            job_id=environ.get(self.variables.job_id, "?"),
            num_nodes=len(lines),
            # With one line per node, the job may have requested no number of tasks.
            tasks_per_node=min(lines.values()) if lines.total() > len(lines) else 0,
        )

    def read_end_s(self, environ: Mapping[str, str], ask: Callable[..., str]) -> tuple[float, str] | None:
        """Returns the end of this job in seconds since the Unix epoch, and its source: a command or variable.

        `ask` runs a command once and returns its output, which is empty if the command failed. Return None
        if a computed end has passed, for example because the job was extended.
        """
        return None

    def read_kill_delay_s(self, ask: Callable[..., str]) -> int | None:
        """Returns the configured seconds from SIGTERM to SIGKILL at the end of a job; None if unknown.

        `ask` runs a command, as in `read_end_s`.
        """
        return None

    def array_index(self, environ: Mapping[str, str]) -> str:
        """Returns the index of this process's job in its job array; empty if the job is not in an array."""
        values = (environ.get(name, "") for name in self.variables.array_indices)
        return next((text for text in values if re.fullmatch("[0-9]{1,10}", text)), "")

    def running_job(self, environ: Mapping[str, str]) -> RunningJob:
        """Returns the job of this process. Outside a job, the process ID serves as the job ID."""
        from ddp_hpc.schedulers.running_job import RunningJob

        return RunningJob(self.job_id(environ), environ)

    def job_id(self, environ: Mapping[str, str]) -> str:
        """Returns the ID of the job of this process; outside a job, the process ID."""
        return environ.get(self.variables.job_id) or str(os.getpid())
