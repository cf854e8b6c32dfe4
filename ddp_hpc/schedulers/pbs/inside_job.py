"""What a process knows about its PBS job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import parse_walltime_s
from ddp_hpc.schedulers.inside_job import InsideJob

if TYPE_CHECKING:
    from ddp_hpc.schedulers.allocation import Allocation
    from ddp_hpc.schedulers.running_job import RunningJob


class PbsInsideJob(InsideJob):
    """Knows the PBS job of this process.

    kill_delay, the time from SIGTERM to SIGKILL, is 10 s by default (pbs_server_attributes.7B).
    """

    can_requeue = True
    kill_delay_s = 10
    job_id_variable = "PBS_JOBID"
    # PBS_ARRAYID is the name in Torque.
    start_variable = "PBS_JOBCOOKIE"
    array_index_variables = ("PBS_ARRAY_INDEX", "PBS_ARRAYID")

    def find_allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        from ddp_hpc.schedulers.allocation import Allocation, read_node_file

        if "PBS_NODEFILE" not in environ:
            return None
        # The node file repeats the name of a node `mpiprocs` times.
        repeats = read_node_file("PBS_NODEFILE", environ, "in its script or in the shell of qsub -I")
        return Allocation(
            scheduler=self.scheduler.name,
            job_id=environ.get("PBS_JOBID", "?"),
            num_nodes=len(repeats),
            tasks_per_node=min(repeats.values()) if repeats.total() > len(repeats) else 0,
        )

    def read_end_s(self, environ: Mapping[str, str], ask: Callable[..., str]) -> tuple[float, str] | None:
        from ddp_hpc.schedulers.job_state import clock_s
        from ddp_hpc.schedulers.pbs.query_and_cancel import TIME_FORMAT, attributes_in

        attributes = attributes_in(ask("qstat", "-f", self.job_id(environ)))
        start_s = clock_s(attributes.get("stime", ""), TIME_FORMAT)
        try:
            walltime_s = parse_walltime_s(attributes.get("Resource_List.walltime", ""))
        except RequestError:
            return None
        if start_s is None:
            return None
        return start_s + walltime_s, "qstat"

    def running_job(self, environ: Mapping[str, str]) -> RunningJob:
        from ddp_hpc.schedulers.pbs.running_job import PbsJob

        return PbsJob(self.job_id(environ), environ)


ROLE = PbsInsideJob
