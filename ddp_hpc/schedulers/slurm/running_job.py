"""The Slurm job of this process: its time limit, and its requeue."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from ddp_hpc.errors import DdpHpcError
from ddp_hpc.schedulers import run_command as commands
from ddp_hpc.schedulers.running_job import RunningJob, Say, without_job

# A directive that chooses the QOS. Some sites derive the partition from the QOS, so a resubmitted job with
# this directive must not name a partition.
_QOS = re.compile(r"^#SBATCH\s+(?:--qos\b|-q\b)", re.MULTILINE)


class SlurmJob(RunningJob):
    """The Slurm job of this process."""

    work_dir_variable = "SLURM_SUBMIT_DIR"

    def __init__(self, job_id: str, environ: Mapping[str, str]) -> None:
        super().__init__(job_id, environ)
        # On SIGTERM, srun would kill all ranks immediately. scancel sends the signal to the ranks instead.
        if self.is_job and shutil.which("scancel"):
            self.forwards_term = f"scancel --signal={{signal}} {job_id}"

    def end_s(self) -> float | None:
        text = self.environ.get("SLURM_JOB_END_TIME", "")
        return float(text) if re.fullmatch(r"[0-9]{1,10}", text) else None

    def resubmit(self, script: Path, attempt: int, say: Say) -> None:
        """Requeues the job. If scontrol is missing or not permitted, a new job is submitted."""
        if shutil.which("scontrol"):
            # If scontrol does not answer, the job may have been requeued, and a new job would run at the same
            # time.
            answer = commands.submit("scontrol", "requeue", self.job_id)
            if answer.code == 0 or "pending" in answer.out + answer.err:
                return
            say(f"ddp-hpc: scontrol requeue failed: {answer.said}; submitting a new job instead")
        environ = without_job(self.environ, ("SLURM", "SRUN_", "SBATCH_"), keep="SLURM_CONF")
        environ["DDP_HPC_ATTEMPT"] = str(attempt)
        text = script.read_text(encoding="utf-8", errors="replace")
        options = [f"--dependency=afterany:{self.job_id}"]
        if index := self.environ.get("SLURM_ARRAY_TASK_ID"):
            options.append(f"--array={index}")
        if (name := self.environ.get("SLURM_JOB_PARTITION")) and not _QOS.search(text):
            options.append(f"--partition={name}")
        if name := self.environ.get("SLURM_JOB_ACCOUNT"):
            options.append(f"--account={name}")
        words = (*options, str(script), *self.arguments)
        answer = commands.submit("sbatch", *words, environ=environ, cwd=self.work_dir)
        if answer.code:
            raise DdpHpcError(f"sbatch failed: {answer.said}")
        say(answer.out.strip())
