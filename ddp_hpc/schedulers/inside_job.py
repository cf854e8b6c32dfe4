"""The role of a scheduler that describes the job in which this process runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from ddp_hpc.schedulers.allocation import Allocation
    from ddp_hpc.schedulers.running_job import RunningJob
    from ddp_hpc.schedulers.scheduler import Scheduler


class InsideJob:
    """Knows the job of this process. The defaults are those of a scheduler that reports nothing about it."""

    can_requeue: ClassVar[bool] = False
    """Whether a script can requeue or resubmit itself at the end of its walltime."""
    kill_delay_s: ClassVar[int] = 0
    """The usual time between SIGTERM and SIGKILL at the end of a job; 0 if unknown."""

    # Attributes for jobs, and for the commands on this machine.
    job_id_variable: ClassVar[str] = ""
    """The environment variable with the job id; empty if the scheduler sets no such variable."""
    start_variable: ClassVar[str] = ""
    """The environment variable that differs between the starts of a job that the scheduler requeues."""
    end_time_variable: ClassVar[str] = ""
    """The environment variable with the end of the job, in seconds since the Unix epoch."""
    array_index_variables: ClassVar[tuple[str, ...]] = ()
    """The environment variables with the index of a task of a job array, of which one is set."""

    # Methods for jobs.

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def find_allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """Returns the allocation of which this process is a part; None outside a job of this scheduler.

        Raises:
            RequestError: the scheduler's variables are invalid.
        """
        return None

    def read_end_s(self, environ: Mapping[str, str], ask: Callable[..., str]) -> tuple[float, str] | None:
        """Returns the end of this job in seconds since the Unix epoch, and its source: a command or variable.

        `ask` runs a command once and returns its output, which is empty if the command failed.
        """
        return None

    def read_kill_delay_s(self, ask: Callable[..., str]) -> int | None:
        """Returns the configured seconds from SIGTERM to SIGKILL at the end of a job; None if unknown.

        `ask` runs a command, as in `read_end_s`.
        """
        return None

    def array_index(self, environ: Mapping[str, str]) -> str:
        """Returns the index of this process's job in its job array; empty if the job is not in an array."""
        values = (environ.get(name, "") for name in self.array_index_variables)
        return next((text for text in values if re.fullmatch("[0-9]{1,10}", text)), "")

    def running_job(self, environ: Mapping[str, str]) -> RunningJob:
        """Returns the job of this process. Outside a job, the process ID serves as the job ID."""
        from ddp_hpc.schedulers.running_job import RunningJob

        return RunningJob(self.job_id(environ), environ)

    def job_id(self, environ: Mapping[str, str]) -> str:
        """Returns the ID of the job of this process; outside a job, the process ID."""
        return environ.get(self.job_id_variable) or str(os.getpid())
