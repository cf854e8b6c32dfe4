"""The Slurm job of this process: its time limit, why Slurm ends it, and its requeue."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.schedulers import run_command as commands
from ddp_hpc.schedulers.running_job import (
    Queued,
    RunningJob,
    StopCause,
    Successor,
    with_count,
    without_job,
)
from ddp_hpc.schedulers.slurm.query_and_cancel import fields_of, job_id_of

# A directive that chooses the QOS. Some sites derive the partition from the QOS, so a resubmitted job with
# this directive must not name a partition.
_QOS = re.compile(r"^#SBATCH\s+(?:--qos\b|-q\b)", re.MULTILINE)

_ANSWER_S = 5.0

# Not the steps `batch` and `extern`, which Slurm itself creates.
_STEP = re.compile(r"\.\d+$")


class SlurmJob(RunningJob):
    """The Slurm job of this process."""

    watched_ports = (9, 6818)  # the latter is that of slurmd, which no firewall can block
    work_dir_variable = "SLURM_SUBMIT_DIR"

    def __init__(self, job_id: str, environ: Mapping[str, str]) -> None:
        super().__init__(job_id, environ)
        # On SIGTERM, srun would kill all ranks immediately. scancel sends the signal to the ranks instead.
        if self.is_job and shutil.which("scancel"):
            self.forwards_term = f"scancel --signal={{signal}} {job_id}"

    def stop_cause(self, limit_s: float) -> StopCause:
        # Seen with Slurm 22.05 and 26.05 while the batch script handled SIGTERM: the reason is TimeLimit at
        # the time limit, Restarts is incremented for a requeue, and after scancel the job is COMPLETING.
        try:
            answer = commands.run(("scontrol", "--oneliner", "show", "job", self.job_id), limit_s)
        except commands.NoAnswerError:
            return "unknown"
        job = fields_of(answer.out)
        if job.get("Reason") == "TimeLimit":
            return "walltime"
        restarts = self.environ.get("SLURM_RESTART_COUNT", "0")
        if job.get("Restarts", restarts) != restarts:
            return "requeued"
        if job.get("PreemptTime", "None") != "None":
            return "preempted"
        return "cancelled" if job.get("JobState", "") in ("COMPLETING", "CANCELLED") else "unknown"

    def node_names(self) -> str:
        return self.environ.get("SLURM_JOB_NODELIST", "")

    def scheduler_answers(self) -> bool:
        with suppress(commands.NoAnswerError):
            return commands.run(("scontrol", "show", "job", self.job_id), _ANSWER_S).code == 0
        return False

    def on_nodes(
        self, argv: Sequence[str], names: Sequence[str], num_nodes: int, directory: Path
    ) -> tuple[list[str], dict[str, str]]:
        launcher = argv[0].rpartition("/")[2]
        if launcher != "srun":
            raise RequestError(
                f"--spare-nodes or --min-nodes was given, but the launch line begins with {launcher}; it "
                "must begin with srun, since only srun can leave nodes of a job out"
            )
        for option in ("--nodes", "--ntasks"):
            argv = with_count(argv, option, num_nodes, len(names))
        # A step on a node that has died keeps its resources on all nodes until Slurm has noticed the loss.
        return [argv[0], f"--nodelist={','.join(names)}", "--overlap", *argv[1:]], {}

    def run_beside_ranks(self, name: str, argv: Sequence[str]) -> None:
        words = ["srun", f"--jobid={self.environ['SLURM_JOB_ID']}", "--overlap", "--nodes=1", "--ntasks=1"]
        words += [f"--nodelist={name}", "--gres=none", "--mpi=none", *argv]
        # The options of the job are in variables that srun reads. Slurm 22.05 rejects a step of one task with
        # those of sbatch --gpus-per-node or --ntasks-per-gpu.
        environ = without_job(self.environ, ("SLURM", "SRUN_"), keep="SLURM_CONF")
        null = subprocess.DEVNULL
        with suppress(OSError):
            subprocess.Popen(words, env=environ, stdin=null, stdout=null, stderr=null)

    def end_ranks(self, limit_s: float) -> bool:
        # Seen with Slurm 22.05: if both processes of srun are killed, its ranks run on, and the next srun
        # waits for their CPUs. `scancel --signal=KILL` with only the job's ID would end the job.
        ask = ("squeue", "--steps", "--noheader", "--format=%i", f"--jobs={self.job_id}")
        end_s = time.monotonic() + limit_s
        with suppress(commands.NoAnswerError):
            while (left_s := end_s - time.monotonic()) > 0:
                answer = commands.run(ask, left_s)
                steps = [step for step in answer.out.split() if _STEP.search(step)]
                if answer.code == 0 and not steps:
                    return True
                if steps:
                    commands.run(("scancel", "--signal=KILL", *steps), left_s)
                time.sleep(0.5)
        return False

    def resubmit(self, request: Successor) -> Queued:
        """Requeues the job. If scontrol is missing or not permitted, a new job is submitted."""
        if shutil.which("scontrol"):
            # If scontrol does not answer, the job may have been requeued, and a new job would run at the same
            # time.
            requeue = ("scontrol", "requeue", self.job_id)
            answer = commands.submit_until(
                requeue,
                request.until_s,
                request.on_unreachable,
                may_repeat=True,
            )
            if answer.code == 0 or "pending" in answer.out + answer.err:
                return Queued(self.job_id, requeue)
            request.say(f"ddp-hpc: scontrol requeue failed: {answer.said}; submitting a new job instead")
        environ = without_job(self.environ, ("SLURM", "SRUN_", "SBATCH_"), keep="SLURM_CONF")
        environ["DDP_HPC_ATTEMPT"] = str(request.attempt)
        options = [f"--dependency=afterany:{self.job_id}", *self._request()]
        words = ("sbatch", *options, str(request.script), *self.arguments)
        answer = commands.submit_until(
            words, request.until_s, request.on_unreachable, environ=environ, cwd=self.work_dir
        )
        if answer.code:
            raise DdpHpcError(f"sbatch failed: {answer.said}")
        last = (answer.out.rstrip().splitlines() or [""])[-1]
        if (job_id := job_id_of(last)) is None:
            raise DdpHpcError(f"sbatch printed no job ID; check whether the job is queued: {answer.said}")
        return Queued(job_id, words)

    def _request(self) -> list[str]:
        """Returns options of sbatch that the user may have given on the command line."""
        index = self.environ.get("SLURM_ARRAY_TASK_ID")
        options = [f"--array={index}"] if index else []
        if (name := self.environ.get("SLURM_JOB_PARTITION")) and not _QOS.search(self.script):
            options.append(f"--partition={name}")
        if name := self.environ.get("SLURM_JOB_ACCOUNT"):
            options.append(f"--account={name}")
        return options
