"""The PBS job of this process: its walltime, and the submission of its successor."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from pathlib import Path

from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.schedulers import run_command as commands
from ddp_hpc.schedulers.job_state import was_dropped
from ddp_hpc.schedulers.pbs.query_and_cancel import attributes_in, read_job
from ddp_hpc.schedulers.running_job import RunningJob, Say, started_s
from ddp_hpc.units import parse_walltime_s

_ASK_LIMIT_S = 30.0
# At the end of the walltime, PBS kills this process a few seconds after SIGTERM.
_ASK_AT_END_LIMIT_S = 3.0
_RETRY_S = 300.0
_PAUSES_S = (2.0, 4.0, 8.0, 16.0)
# The variables that a login shell needs. The successor receives no other variables of this job.
_KEPT = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "PWD", "LANG", "TZ", "PBS_CONF_FILE")
_RESOURCE = re.compile(r"""(?:^|,)['"]*([A-Za-z_][A-Za-z0-9_]*)=""")
_INDICES = ("PBS_ARRAY_INDEX", "PBS_ARRAYID")
_JOB_ID = re.compile(r"^[0-9]+(?:\.[A-Za-z0-9.-]+)?$", re.MULTILINE)
# qsub's options for the account, with the attribute in which the server stores the value.
_ACCOUNTS = {
    r" -A": ("-A", "Account_Name"),
    r" -P": ("-P", "project"),
    r""" -W *['"]?\S*?group_list=""": ("-W", "group_list"),
}


class PbsJob(RunningJob):
    """The PBS job of this process. The server is queried once, at the start of the job."""

    sets_long_tmpdir = True
    work_dir_variable = "PBS_O_WORKDIR"

    def __init__(self, job_id: str, environ: Mapping[str, str]) -> None:
        super().__init__(job_id, environ)
        self._attributes = self._query(_ASK_LIMIT_S)

    def _query(self, limit_s: float) -> dict[str, str]:
        """Returns the attributes that `qstat -f` prints for this job; empty if qstat fails."""
        if "PBS_JOBID" not in self.environ:
            return {}
        try:
            return attributes_in(commands.run(("qstat", "-f", self.job_id), limit_s).out)
        except commands.NoAnswerError:
            return {}

    def end_s(self) -> float | None:
        # qsub options override the directives, so take the walltime that the server reports.
        text = self._attributes.get("Resource_List.walltime", "")
        try:
            return started_s() + (int(text) if text.isdecimal() else parse_walltime_s(text))
        except RequestError:
            return None

    def was_cancelled(self) -> bool:
        # In the last half minute of the walltime, a cancelled job receives the same signal as a job that
        # reaches its limit. Only the comment of a cancelled job ends in `and terminated`.
        return " and terminated" in self._query(_ASK_AT_END_LIMIT_S).get("comment", "")

    def resubmit(self, script: Path, attempt: int, say: Say) -> None:
        """Submits a job to the same queue and account. It does not inherit the variables of this job."""
        text = script.read_text(encoding="utf-8", errors="surrogateescape")
        argv = [*self._account(), *self._queue(), *self._resources(text)]
        own = re.findall(r"^#PBS +(?:.* )?-v *(\S+)", text, re.MULTILINE)
        # PBS has no arrays of one job, so the successor gets its array index as a variable.
        index = [f"{name}={self.environ[name]}" for name in _INDICES if self.environ.get(name)]
        variables = ",".join([*own, *index, f"DDP_HPC_ATTEMPT={attempt}"])
        last = ["-v", variables, str(script)]
        successor = self._qsub([*argv, "-W", f"depend=afterany:{self.job_id}", *last], say)
        if was_dropped(read_job, successor):
            say(
                f"ddp-hpc: PBS has dropped job {successor} because the server no longer knows job "
                f"{self.job_id}; submitting it again without the dependency"
            )
            successor = self._qsub([*argv, *last], say)
        say(successor)

    def _qsub(self, arguments: list[str], say: Say) -> str:
        """Submits a job and returns its ID. Retries only while the server is unreachable.

        After any other error a retry is unsafe, because the job may be queued although qsub failed.
        """
        environ = {name: self.environ[name] for name in _KEPT if self.environ.get(name)}
        environ["PWD"] = str(self.work_dir)
        end_s = time.monotonic() + _RETRY_S
        for pause_s in chain(_PAUSES_S, repeat(_PAUSES_S[-1])):
            answer = commands.run(["qsub", *arguments], commands.SUBMISSION_LIMIT_S, environ, self.work_dir)
            if answer.code == 0:
                break
            if not commands.is_unreachable(answer):
                raise DdpHpcError(f"qsub failed: {answer.said}")
            if time.monotonic() >= end_s or self.was_cancelled():
                raise DdpHpcError(f"qsub still failed after {_RETRY_S:.0f} s of retries: {answer.said}")
            if pause_s == _PAUSES_S[0]:
                say(f"ddp-hpc: qsub failed: {answer.said}; retrying for up to {_RETRY_S:.0f} s")
            time.sleep(pause_s)
        found = _JOB_ID.findall(answer.out)
        if not found:
            raise DdpHpcError(f"qsub printed no job ID; check whether the job is queued: {answer.said}")
        return str(found[-1])

    def _account(self) -> Iterator[str]:
        """Yields the accounting options of qsub's command line; those of the script are in its directives."""
        if not self._attributes and (account := self.environ.get("PBS_ACCOUNT")):
            yield from ("-A", account)
        for pattern, options in _ACCOUNTS.items():
            if re.search(pattern, self._submit_arguments):
                flag, attribute = options
                if name := self._attributes.get(attribute):
                    yield from (("-W", f"group_list={name}") if flag == "-W" else (flag, name))

    def _queue(self) -> list[str]:
        # PBS_QUEUE may name a queue that accepts no direct submissions, because a routing queue feeds it.
        queue = self.environ.get("PBS_O_QUEUE")
        return ["-q", queue] if queue else []

    def _resources(self, script: str) -> Iterator[str]:
        """Yields options for the resources that the directives and qsub's options request."""
        requests = re.findall(r"^#PBS +-l *(.*)", script, re.MULTILINE)
        requests += re.findall(r" -l *(\S+)", self._submit_arguments)
        for name in sorted({name for request in requests for name in _RESOURCE.findall(request)}):
            if value := self._attributes.get(f"Resource_List.{name}"):
                yield from ("-l", f"{name}={value}")

    @property
    def _submit_arguments(self) -> str:
        return f" {self._attributes.get('Submit_arguments', '')}"
