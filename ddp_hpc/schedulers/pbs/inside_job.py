"""What a process knows about its PBS job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import parse_walltime_s
from ddp_hpc.schedulers.inside_job import InsideJob

if TYPE_CHECKING:
    from ddp_hpc.schedulers.running_job import RunningJob


class PbsInsideJob(InsideJob):
    """Knows the PBS job of this process.

    kill_delay, the time from SIGTERM to SIGKILL, is 10 s by default (pbs_server_attributes.7B).
    """

    can_requeue = True
    kill_delay_s = 10

    def read_end_s(self, environ: Mapping[str, str], ask: Callable[..., str]) -> tuple[float, str] | None:
        from ddp_hpc.schedulers.job_state import clock_s
        from ddp_hpc.schedulers.pbs.query_and_cancel import TIME_FORMAT, attributes_in

        attributes = attributes_in(ask("qstat", "-f", self.job_id(environ)))
        start_s = clock_s(attributes.get("stime", ""), TIME_FORMAT)
        try:
            walltime_s = parse_walltime_s(attributes.get("Resource_List.walltime", ""))
        except RequestError:
            return None
        return None if start_s is None else (start_s + walltime_s, "qstat")

    def running_job(self, environ: Mapping[str, str]) -> RunningJob:
        from ddp_hpc.schedulers.pbs.running_job import PbsJob

        return PbsJob(self.job_id(environ), environ)


ROLE = PbsInsideJob
