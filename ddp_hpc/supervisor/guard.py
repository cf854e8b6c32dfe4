"""`python -m ddp_hpc.supervisor.guard NODE JOB`: requeues a job whose first node has died.

A job with spare nodes is submitted with `--no-kill`, so that Slurm does not end it when a node dies. If that
is the node of the job script, nothing remains that could end the job, and the other nodes idle until the end
of the walltime (seen with Slurm 22.05). This process runs on one of them.
"""

from __future__ import annotations

import signal
import sys
import time

from ddp_hpc.schedulers.run_command import NoAnswerError, ask, submit
from ddp_hpc.schedulers.slurm.running_job import SlurmJob
from ddp_hpc.supervisor.spare_nodes import NodeWatch

# Longer than the time after which the first node itself gives up another one.
_SILENT_S, _EVERY_S = 30.0, 5.0


def main(node: str, job_id: str) -> None:
    """Waits until the node no longer answers, and then requeues the job, or cancels it if that is refused."""
    watch = NodeWatch([node], SlurmJob.watched_ports)
    while True:
        time.sleep(_EVERY_S)
        if not watch.lost(_SILENT_S):
            continue
        try:
            # Without an answer, this node itself is disconnected, and the job may be well. The first node is
            # asked once more, because the connection may just have come back.
            ask("scontrol", "show", "job", job_id)
            watch.ask_again()
            if watch.lost(_SILENT_S) and _end_job(job_id):
                return
        except NoAnswerError:
            continue


def _end_job(job_id: str) -> bool:
    answer = submit("scontrol", "requeue", job_id)
    is_requeued = answer.code == 0 or "pending" in answer.out + answer.err  # by Slurm itself, for example
    return is_requeued or submit("scancel", job_id).code == 0


if __name__ == "__main__":
    # Slurm sends a signal for the ranks to all steps of the job, and a program can go on after SIGUSR1.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    main(*sys.argv[1:])
