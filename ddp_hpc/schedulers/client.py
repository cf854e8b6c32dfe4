"""Access to the scheduler of this machine: job states and submission."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from typing import TypeVar

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.text_table import printable
from ddp_hpc.schedulers import run_command as commands
from ddp_hpc.schedulers.job_state import JobState
from ddp_hpc.schedulers.registry import MONITORED
from ddp_hpc.schedulers.scheduler import Scheduler

T = TypeVar("T")
# Messages of scontrol without a slurm.conf, and of qstat without a pbs.conf.
_NOT_HERE = re.compile(
    r"could not establish a configuration source|No default server name|pbsconf error", re.IGNORECASE
)


def read_job(job_id: str) -> JobState | None:
    """Returns the state of the job from this machine's scheduler; None if there is no such job.

    If commands of several schedulers are installed, such as Slurm's commands on a PBS machine, all of these
    schedulers are queried.

    Raises:
        RequestError: no scheduler's commands are on the PATH, or the job is an array.
        DdpHpcError: no scheduler answers.
    """
    return _first(job_id, lambda scheduler: scheduler.commands.job_commands().read_job(job_id))


def read_jobs(job_id: str) -> list[JobState]:
    """Returns the state of the job, or the states of the tasks of a job array; empty if there is no such job.

    Raises what `read_job` raises.
    """
    return _first(job_id, lambda scheduler: scheduler.commands.job_commands().read_jobs(job_id)) or []


def _first(job_id: str, ask: Callable[[Scheduler], T | None]) -> T | None:
    """Returns the first answer of a scheduler that knows the job; None if none knows it."""
    answered: list[str] = []
    problems: dict[str, DdpHpcError] = {}
    for scheduler in _schedulers(job_id):
        try:
            if answer := ask(scheduler):
                return answer
            answered.append(scheduler.title)
        except RequestError:
            raise
        except DdpHpcError as error:
            problems[scheduler.title] = error
    # Clients without a configuration are ignored, but a scheduler that is temporarily down may have the job.
    real = {title: problem for title, problem in problems.items() if not _NOT_HERE.search(str(problem))}
    if not answered and problems:
        raise next(iter((real or problems).values()))
    for title, problem in real.items():
        if isinstance(problem, commands.NoAnswerError):
            raise commands.NoAnswerError(
                f"{answered[0]} does not know job {job_id}, and {title} does not answer: {problem}"
            )
    return None


def _schedulers(job_id: str) -> list[Scheduler]:
    """Returns the schedulers of this machine to which the job can belong, in the order of the PATH."""
    directories = os.environ.get("PATH", os.defpath).split(os.pathsep)
    known = MONITORED.values()
    # If one directory has the commands of both, Slurm comes first: Slurm's wrappers for Torque include qstat,
    # but PBS has no scontrol.
    in_order = (s for path in directories for s in known if shutil.which(s.query_command, path=path))
    present = list(dict.fromkeys(in_order))
    if not present:
        wanted = " nor ".join(f"{scheduler.query_command} ({scheduler.title})" for scheduler in known)
        raise RequestError(
            f"neither {wanted} was found on the PATH. Run this on a login node, or load the module of the "
            "scheduler."
        )
    return [scheduler for scheduler in present if scheduler.commands.job_id_pattern.search(job_id)] or present


def send(scheduler: Scheduler, words: list[str], environ: Mapping[str, str]) -> str:
    """Runs this submit command, such as sbatch or qsub, and returns the id of the queued job.

    Raises:
        RequestError: the scheduler rejected the job; nothing was queued.
        DdpHpcError: it is unknown whether a job was queued.
    """
    program = scheduler.submit_program
    answer = commands.submit(*words, environ=environ)
    if answer.code:
        said = re.sub(rf"(^|; ){program}: +(error: )?", r"\1", answer.said)
        raise RequestError(
            f"{program} rejected the job: {said}. No job was queued. Fix the request, and submit again."
        )
    # The site may print a banner before the job id.
    last = (answer.out.rstrip().splitlines() or [""])[-1].strip()
    job_id = scheduler.commands.job_commands().job_id_of(last)
    if job_id is None:
        raise commands.NoAnswerError(
            f"{program} printed {printable(last[:80])!r} instead of a job ID. Check whether the job is "
            "queued before you try again."
        )
    return job_id
