"""Access to the scheduler of this machine: job states and submission."""

from __future__ import annotations

import os
import re
import shutil

from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.schedulers import run_command as commands
from ddp_hpc.schedulers.base import JobCommands
from ddp_hpc.schedulers.job_state import JobState
from ddp_hpc.schedulers.registry import SCHEDULERS

# Messages of scontrol without a slurm.conf, and of qstat without a pbs.conf.
_NOT_HERE = re.compile(
    r"could not establish a configuration source|No default server name|pbsconf error", re.IGNORECASE
)


def read_job(job_id: str) -> JobState | None:
    """Return the state of the job from this machine's scheduler; None if there is no such job.

    If the commands of both schedulers are installed, as on a PBS machine with Slurm's clients, the scheduler
    that has the job is used.

    Raises:
        RequestError: no scheduler's commands are on the PATH.
        DdpHpcError: no scheduler answers.
    """
    answered: list[str] = []
    problems: dict[str, DdpHpcError] = {}
    for scheduler in _schedulers(job_id):
        try:
            if (job := scheduler.read_job(job_id)) is not None:
                return job
            answered.append(scheduler.title)
        except RequestError:
            raise
        except DdpHpcError as error:
            problems[scheduler.title] = error
    # Clients without configuration are ignored. A scheduler that is temporarily down may have the job.
    real = {title: one for title, one in problems.items() if not _NOT_HERE.search(str(one))}
    if not answered and problems:
        raise next(iter((real or problems).values()))
    for title, problem in real.items():
        if isinstance(problem, commands.NoAnswerError):
            raise commands.NoAnswerError(
                f"{answered[0]} does not know job {job_id}, and {title} does not answer: {problem}"
            )
    return None


def job_commands() -> dict[str, JobCommands]:
    """Return the schedulers whose jobs can be monitored, by name."""
    found = {name: scheduler.job_commands() for name, scheduler in SCHEDULERS.items()}
    return {name: commands for name, commands in found.items() if commands is not None}


def _schedulers(job_id: str) -> list[JobCommands]:
    """Return the schedulers of this machine whose job ids match, in the order of the PATH."""
    directories = os.environ.get("PATH", os.defpath).split(os.pathsep)
    known = job_commands().values()
    # If both are in one directory, Slurm comes first: its Torque wrappers include qstat, but PBS has no
    # scontrol.
    in_order = (one for path in directories for one in known if shutil.which(one.asks, path=path))
    found = list(dict.fromkeys(in_order))
    if not found:
        wanted = " nor ".join(f"{one.asks} ({one.title})" for one in known)
        raise RequestError(
            f"neither {wanted} is on the PATH. Run this on a login node, or load the module that "
            "provides them."
        )
    return [one for one in found if one.job_id_pattern.search(job_id)] or found


def send(scheduler: JobCommands, words: list[str]) -> str:
    """Run this sbatch or qsub command and return the id of the queued job.

    Raises:
        RequestError: the scheduler rejected the job; nothing was queued.
        DdpHpcError: it is unknown whether a job was queued.
    """
    answer = commands.submit(*words)
    if answer.code:
        said = re.sub(rf"(^|; ){scheduler.program}: +(error: )?", r"\1", answer.said)
        raise RequestError(
            f"{scheduler.program} rejected the job: {said}. Nothing was queued. Fix the request and "
            "submit again."
        )
    # The output may begin with other text of the site, such as a banner.
    last = (answer.out.rstrip().splitlines() or [""])[-1].strip()
    job_id = scheduler.job_id_of(last)
    if job_id is None:
        raise commands.NoAnswerError(
            f"{scheduler.program} printed {commands.plain(last[:80])!r} instead of a job id. Check "
            "whether the job is queued before you try again."
        )
    return job_id
