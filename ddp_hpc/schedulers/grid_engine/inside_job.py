"""What a process knows about its Grid Engine job."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_hpc.schedulers.inside_job import InsideJob


class GridEngineInsideJob(InsideJob):
    """Knows the Grid Engine job of this process.

    When a job reaches h_rt, it is killed with SIGKILL without a warning (queue_conf.5).
    """

    kill_delay_s = 1
    array_index_variables = ("SGE_TASK_ID",)

    def job_id(self, environ: Mapping[str, str]) -> str:
        return environ.get("JOB_ID") or super().job_id(environ)


ROLE = GridEngineInsideJob
