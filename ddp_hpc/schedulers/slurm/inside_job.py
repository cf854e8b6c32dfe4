"""What a process knows about its Slurm job."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import parse_walltime_s
from ddp_hpc.schedulers.inside_job import InsideJob

if TYPE_CHECKING:
    from ddp_hpc.schedulers.allocation import Allocation
    from ddp_hpc.schedulers.running_job import RunningJob

_KILL_WAIT = re.compile(r"^KillWait\s*=\s*([0-9]{1,6}) sec", re.MULTILINE)


class SlurmInsideJob(InsideJob):
    """Knows the Slurm job of this process.

    KillWait, the time from SIGTERM to SIGKILL, is 30 s by default (slurm.conf.5).
    """

    can_requeue = True
    kill_delay_s = 30

    def find_allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        from ddp_hpc.schedulers.allocation import Allocation, first_number, smallest_count

        if not (job_id := environ.get(self.variables.job_id)):
            return None
        text = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "")
        if not first_number(text):
            raise RequestError(
                f"job {job_id} has SLURM_JOB_NUM_NODES={text[:40]!r}; it must be the number of nodes. "
                f"Run ddp-hpc launch in the shell of sbatch or salloc, or unset {self.variables.job_id}."
            )
        # Every job has SLURM_TASKS_PER_NODE, but it is the number of CPUs if no tasks were requested.
        requested = "SLURM_NTASKS" in environ
        return Allocation(
            scheduler=self.scheduler.name,
            job_id=job_id,
            num_nodes=first_number(text),
            tasks_per_node=smallest_count(environ.get("SLURM_TASKS_PER_NODE", "")) if requested else 0,
            cpus_per_node=smallest_count(environ.get("SLURM_JOB_CPUS_PER_NODE", "")),
            # The shell of salloc has only SLURM_GPUS_PER_NODE, whose value is `4` or `a100:4`, as requested.
            gpus_per_node=first_number(environ.get("SLURM_GPUS_ON_NODE", ""))
            or first_number(environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]),
        )

    def read_end_s(self, environ: Mapping[str, str], ask: Callable[..., str]) -> tuple[float, str] | None:
        # %L is the remaining walltime, [D-]HH:MM:SS; the end time (%e) would be in an unknown time zone.
        left = ask("squeue", "--noheader", f"--jobs={self.job_id(environ)}", "--format=%L").strip()
        hours = left if left.count(":") == 2 else f"0:{left}"  # hours are omitted below one hour
        try:
            return time.time() + parse_walltime_s(hours), "squeue"
        except RequestError:
            return None

    def read_kill_delay_s(self, ask: Callable[..., str]) -> int | None:
        match = _KILL_WAIT.search(ask("scontrol", "show", "config"))
        return int(match[1]) if match else None

    def job_id(self, environ: Mapping[str, str]) -> str:
        # The SLURM_JOB_ID of one task of each array is the ID of the whole array: `scontrol requeue` and
        # `scancel` with this ID would affect all tasks.
        array, index = environ.get("SLURM_ARRAY_JOB_ID"), self.array_index(environ)
        return f"{array}_{index}" if array and index else super().job_id(environ)

    def running_job(self, environ: Mapping[str, str]) -> RunningJob:
        from ddp_hpc.schedulers.slurm.running_job import SlurmJob

        return SlurmJob(self.job_id(environ), environ)


ROLE = SlurmInsideJob
