"""`python -m ddp_hpc.supervisor.guard NODE JOB`: requeues a job whose first node has died.

A job with spare nodes is submitted with `--no-kill`, so that Slurm does not end it when a node dies. If that
is the node of the job script, nothing remains that could end the job, and the other nodes idle until the end
of the walltime (seen with Slurm 22.05). This process runs on one of them.
"""

from __future__ import annotations

import sys
import time

from ddp_hpc.schedulers.run_command import NoAnswerError, run
from ddp_hpc.schedulers.slurm.running_job import SlurmJob
from ddp_hpc.supervisor.spare_nodes import NodeWatch

# Longer than the time after which the first node itself gives up another one.
_SILENT_S, _LIMIT_S, _EVERY_S = 30.0, 60.0, 5.0


def main(node: str, job_id: str) -> None:
    """Waits until the node no longer answers, and then requeues the job, or cancels it if that is refused."""
    watch = NodeWatch([node], SlurmJob.watched_port)
    while not watch.silent(_SILENT_S):
        time.sleep(_EVERY_S)
    while True:
        for command in ("scontrol", "requeue", job_id), ("scancel", job_id):
            try:
                if run(command, _LIMIT_S).code == 0:
                    return
            except NoAnswerError:
                break  # this node has no connection to Slurm, either
        time.sleep(_EVERY_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
