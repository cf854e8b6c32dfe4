"""The LSF job of this process: its run limit, and the submission of its successor."""

from __future__ import annotations

import re
from pathlib import Path

from ddp_hpc.errors import DdpHpcError
from ddp_hpc.schedulers import run_command as commands
from ddp_hpc.schedulers.running_job import RunningJob, Say, started_s, without_job

_SUBMITTED = re.compile(r"Job <([0-9]+)> is submitted")
# Without LSB_BSUB_PARSE_SCRIPT in lsf.conf, bsub reads #BSUB lines only from its standard input.
_BSUB = ("/bin/sh", "-c", 'script=$1; shift; exec bsub "$@" <"$script"', "bsub")


class LsfJob(RunningJob):
    """The LSF job of this process."""

    work_dir_variable = "LS_SUBCWD"

    def end_s(self) -> float | None:
        # bsub options override the directives, so take the run limit that the server reports, in minutes.
        limit_s = self._limit_s()
        return None if limit_s is None else started_s() + limit_s

    def _limit_s(self) -> float | None:
        try:
            text = commands.ask("bjobs", "-noheader", "-o", "runtimelimit", self.job_id).out.strip()
        except DdpHpcError:
            return None
        return float(text) * 60 if re.fullmatch(r"[0-9]{1,8}\.[0-9]", text) else None

    def resubmit(self, script: Path, attempt: int, say: Say) -> None:
        """Submits a job to the same queue and project. It does not inherit the variables of this job."""
        options = ["-w", f"ended({self.job_id})"]
        if (limit_s := self._limit_s()) is not None:
            options += ["-W", str(-int(-limit_s // 60))]
        if queue := self.environ.get("LSB_QUEUE"):
            options += ["-q", queue]
        if (project := self.environ.get("LSB_PROJECT_NAME", "default")) != "default":
            options += ["-P", project]
        if (index := self.environ.get("LSB_JOBINDEX", "0")) != "0":
            name = self.environ.get("LSB_JOBNAME", "ddp").partition("[")[0]
            options += ["-J", f"{name}[{index}]"]
        environ = without_job(self.environ, ("LSB_", "LS_", "JSM_", "CSM_"))
        environ["DDP_HPC_ATTEMPT"] = str(attempt)
        answer = commands.submit(*_BSUB, str(script), *options, environ=environ, cwd=self.work_dir)
        if answer.code or not (found := _SUBMITTED.search(answer.out)):
            raise DdpHpcError(f"bsub failed: {answer.said}")
        say(found[1])
