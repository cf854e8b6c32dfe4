"""What a process knows about its Flux job."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.schedulers.inside_job import InsideJob
from ddp_hpc.schedulers.run_command import ask


class FluxInsideJob(InsideJob):
    """Knows the Flux job of this process."""

    def job_id(self, environ: Mapping[str, str]) -> str:
        # The script runs in its own Flux instance. The attribute is the job's ID in the enclosing instance.
        try:
            return ask("flux", "getattr", "jobid").out.strip() or super().job_id(environ)
        except DdpHpcError:
            return super().job_id(environ)


ROLE = FluxInsideJob
