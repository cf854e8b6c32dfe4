"""Which scheduler this machine has, and what can be asked of it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.queue import commands, pbs, slurm
from ddp_hpc.queue.job_state import JobState


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """One scheduler. `read_job` gives None for a job it knows nothing of, `cancel` what it has against it."""

    name: str
    title: str
    program: str  # that takes scripts
    prefix: str  # of its directives
    asks: str  # the program whose presence tells that this machine has it
    read_job: Callable[[str], JobState | None]
    job_id_of: Callable[[str], str | None]
    cancel: Callable[[str], str]


SCHEDULERS = {
    "slurm": Scheduler(
        name="slurm",
        title="Slurm",
        program="sbatch",
        prefix="#SBATCH",
        asks="scontrol",
        read_job=slurm.read_job,
        job_id_of=slurm.job_id_of,
        cancel=slurm.cancel,
    ),
    "pbs": Scheduler(
        name="pbs",
        title="PBS",
        program="qsub",
        prefix="#PBS",
        asks="qstat",
        read_job=pbs.read_job,
        job_id_of=pbs.job_id_of,
        cancel=pbs.cancel,
    ),
}


def read_job(job_id: str) -> JobState | None:
    """What this machine's scheduler knows of the job; None where it knows of no such job.

    Where the commands of both are there, as on a PBS machine with Slurm's clients, the one that knows
    the job counts.

    Raises:
        RequestError: neither scheduler's commands are on the PATH.
        DdpHpcError: none of them answers.
    """
    answered, problem = False, None
    for scheduler in _schedulers(job_id):
        try:
            if (job := scheduler.read_job(job_id)) is not None:
                return job
            answered = True
        except RequestError:
            raise
        except DdpHpcError as error:
            problem = problem or error
    # A server that is away for a moment may know the job.
    if problem is not None and (not answered or isinstance(problem, commands.NoAnswerError)):
        raise problem
    return None


def _schedulers(job_id: str) -> list[Scheduler]:
    """Those of this machine whose ids may look like this one, the first on the PATH first."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    # In one folder Slurm comes first: its Torque wrappers bring a qstat, PBS brings no scontrol.
    in_order = (
        one for folder in folders for one in SCHEDULERS.values() if shutil.which(one.asks, path=folder)
    )
    found = list(dict.fromkeys(in_order))
    if not found:
        raise RequestError(
            "neither scontrol (Slurm) nor qstat (PBS) is on the PATH; run this on a login node, or load the "
            "module that has them"
        )
    spelling = "pbs" if re.search(r"[.[]", job_id) else "slurm" if re.search("[_@]", job_id) else ""
    return [one for one in found if one.name == spelling] or found


def send(scheduler: Scheduler, words: list[str]) -> str:
    """The id of the job that these words of sbatch or qsub have queued.

    Raises:
        RequestError: the scheduler refused it; nothing was queued.
        DdpHpcError: whether a job was queued is not known.
    """
    answer = commands.submit(*words)
    if answer.code:
        said = re.sub(rf"(^|; ){scheduler.program}: +(error: )?", r"\1", answer.said)
        raise RequestError(
            f"{scheduler.program} refused the job: {said}; nothing was queued; mend what it names, "
            "ddp-hpc lint tells more"
        )
    # A site's own words, such as a banner, may stand before it.
    last = (answer.out.rstrip().splitlines() or [""])[-1].strip()
    job_id = scheduler.job_id_of(last)
    if job_id is None:
        raise commands.NoAnswerError(
            f"{scheduler.program} answers {commands.plain(last[:80])!r} and no job id; look "
            "whether it is queued before you try again"
        )
    return job_id
