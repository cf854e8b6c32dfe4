"""Stand-in for the PBS server: its settings, and the start of jobs in the order of their dependencies."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse import settings as common
from ddp_hpc.rehearse.jobs import delete_request, load, save
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import arrays

NO_MORE_JOBS = "job held, the machine runs no more jobs"

USER = "pbsuser"
# While this file exists, the server does not answer. Tests create it.
DOWN = "server_is_down"

RERUN = 60  # JOB_SUBSTATE_RERUN in job.h

# PBS error numbers (pbs_error.h). Commands exit with the lowest byte.
FINISHED, FINISHED_SUBJOB, UNKNOWN_JOB, INVALID, NO_PERMISSION = 35, 55, 153, 156, 159
BAD_STATE, UNKNOWN_QUEUE = 168, 170


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """The settings of the server, most of which an administrator of PBS sets with qmgr."""

    first_job: int = 12
    server: str = "pbs-srv"
    submit_host: str = "pbs-login.pbs.lab"
    history: bool = True  # whether finished jobs are kept (job_history_enable)
    nodes: tuple[str, ...] = ("x3001c0s1b0n0.hsn.cm.pbs.lab", "x3001c0s1b1n0.hsn.cm.pbs.lab")
    node_ncpus: int = 64
    node_ngpus: int = 4
    system: str = "polaris"
    default_queue: str = "workq"
    default_chunk_ncpus: int = 1  # ALCF sets the number of CPUs of a node
    default_chunk_ngpus: int = 0
    alcf_hook: bool = False  # requires account, walltime and file systems; forces -k doe
    obituary_s: float = 8.0  # minimum time from SIGTERM to the end of the job
    # For rehearsals: all queues and resources are accepted, each chunk has its own node up to the number of
    # nodes, and `schedule` starts the jobs.
    any_site: bool = False


@dataclass(frozen=True)
class Queue:
    """The limits of a queue; 0 means no limit. The defaults are those of a real OpenPBS server."""

    max_nodes: int = 0
    min_walltime_s: int = 0
    max_walltime_s: int = 0
    from_route_only: bool = False


QUEUES = {
    "workq": Queue(),
    "debug": Queue(max_nodes=2, min_walltime_s=300, max_walltime_s=3600),
    "small": Queue(from_route_only=True),
    "preemptable": Queue(),
}


def start_mom(root: Path, number: int) -> None:
    """Starts the daemon of a job, unless this is a rehearsal, in which `schedule` starts the daemons."""
    if not Settings.read(root).any_site:
        jobs.start_daemon(root, "ddp_hpc.rehearse.pbs.mom", number)


def schedule(root: Path) -> None:
    """Starts the jobs of a rehearsal that can run, and holds the jobs beyond `max_jobs`."""
    release(root)
    settings = Settings.read(root)
    for number in jobs.numbers(root):
        job = load(root, number)
        if job["job_state"] != "Q" or job["substate"] != 10 or "_started" in job:
            continue
        if settings.max_jobs and jobs.sequence_number(number) >= settings.first_job + settings.max_jobs:
            save(root, number, {**job, "job_state": "H", "comment": NO_MORE_JOBS})
            continue
        save(root, number, {**job, "_started": True})
        jobs.start_daemon(root, "ddp_hpc.rehearse.pbs.mom", number)


def release(root: Path) -> None:
    """Starts the jobs whose dependencies are satisfied. Called whenever a job is submitted or ends."""
    with jobs.locked(root / "release.lock"):
        for number in jobs.numbers(root):
            job = load(root, number)
            for own in arrays.startable(root, number, job) if "_indices" in job else []:
                jobs.change(root, own, _started=True)
                start_mom(root, own)
            if (
                job["job_state"] != "H"
                or "comment" in job
                or "_after" not in job  # its `depend` can name jobs that wait for this one
                or delete_request(root, number).exists()
            ):
                continue
            decisions = {_decision(kind, _state_of(root, before)) for kind, before in job["_after"]}
            if "drop" in decisions:
                drop(root, number)
            elif decisions <= {"start"}:
                jobs.change(root, number, job_state="Q", Hold_Types="n", substate=10)
                start_mom(root, number)


def _state_of(root: Path, number: int) -> jobs.Attributes:
    job = load(root, number)
    return arrays.state(root, number, job) if "_indices" in job else job


def _decision(kind: str, before: jobs.Attributes) -> str:
    """Returns what happens to a job with this kind of dependency on the job `before`: start, wait or drop."""
    if kind == "after":
        return "start" if "stime" in before else "wait"
    if before["job_state"] != "F":
        return "wait"
    succeeded = before.get("Exit_status") == 0
    return "start" if kind == "afterany" or (kind == "afterok") == succeeded else "drop"


def drop(root: Path, number: int) -> None:
    """Ends a job silently as job_abt of OpenPBS does: without Exit_status, stime or comment."""
    now = int(time.time())
    jobs.change(root, number, job_state="F", substate=92, history_timestamp=now)


def depends_on(root: Path, number: int, after: Sequence[tuple[str, int]]) -> None:
    """Registers the dependencies of a job, and drops the job if the server does not know one of them."""
    settings = Settings.read(root)
    known = [before for _, before in after if is_known(root, before, settings)]
    if len(known) < len(after):
        drop(root, number)
        return
    for kind, before in after:
        name = f"{number}.{settings.server}@{settings.server}"
        job, opposite = load(root, before), kind.replace("after", "before")
        if job["job_state"] != "F":
            listed = [one for one in job.get("depend", "").split(",") if one]
            others = [one for one in listed if not one.startswith(f"{opposite}:")]
            own = next((one for one in listed if one not in others), opposite)
            jobs.change(root, before, depend=",".join([*others, f"{own}:{name}"]))
    release(root)


def is_known(root: Path, number: int, settings: Settings) -> bool:
    """Returns whether the server knows a job. Without job history it forgets jobs that have ended."""
    if not jobs.job_file(root, number).exists():
        return False
    array, _ = arrays.array_of(number)
    if array and jobs.job_file(root, array).exists():
        number = array  # as long as an array is known, qstat shows all of its subjobs
    return settings.history or _state_of(root, number)["job_state"] != "F"


def clock(seconds: int) -> str:
    """Returns a duration as PBS prints it."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def job_id(number: int, server: str) -> str:
    """Returns the job id `12.pbs-srv`, or `12[3].pbs-srv` for the internal number of a subjob."""
    array, index = arrays.array_of(number)
    return f"{array}[{index}].{server}" if array else f"{number}.{server}"


def job_number(command: str, word: str, root: Path) -> int:
    """Returns the number of an existing job, from `12` or `12.pbs-srv`.

    Raises:
        RefusedError: the job is unknown. The error has the message of the real command.
    """
    head = word.partition(".")[0]
    match = re.fullmatch(r"([0-9]{1,6})(\[([0-9]{0,4})\])?", head)
    if match is None:
        raise RefusedError(f"{command}: illegally formed job identifier: {word}", 1)
    settings = Settings.read(root)
    number = arrays.subjob(int(match[1]), int(match[3])) if match[3] else int(match[1])
    is_array = is_known(root, number, settings) and "_indices" in load(root, number)
    if not is_known(root, number, settings) or is_array != (match[2] == "[]"):
        raise RefusedError(f"{command}: Unknown Job Id {head}.{settings.server}", UNKNOWN_JOB)
    return number


def check_running(command: str, root: Path) -> None:
    """Raises the error of a PBS command if the server is down."""
    if (root / DOWN).exists():
        message = f"cannot connect to server {Settings.read(root).server} (errno=111)"
        exit_code = 255 if command == "qstat" else 111
        raise RefusedError(f"Connection refused\n{command}: {message}", exit_code)


def refuse_finished(command: str, number: int, job: jobs.Attributes) -> None:
    """Raises the error of a PBS command for a job that has finished."""
    if job["job_state"] == "F":
        raise RefusedError(f"{command}: Job has finished {number}.{job['server']}", FINISHED)
