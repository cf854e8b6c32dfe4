"""The stand-in's server: its settings, its folder, and one JSON file for each job."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.jobs import delete_request, load, save
from ddp_hpc.rehearse.launchers.options import RefusedError

FOLDER_VARIABLE = "PBS_STAND_IN_HOME"
FIRST_JOB = 12
_SUBJOBS = 10**6
NO_MORE_JOBS = "job held, the machine runs no more jobs"

USER = "pbsuser"
# There: nobody answers. For tests of a server that is away for a while.
DOWN = "server_is_down"

# PBS error numbers, of which the commands return the lowest byte (pbs_error.h).
FINISHED, UNKNOWN_JOB, NO_PERMISSION, BAD_STATE, UNKNOWN_QUEUE = 35, 153, 159, 168, 170


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What qmgr would set. The nodes are names only: everything runs on this machine."""

    server: str = "pbs-srv"
    submit_host: str = "pbs-login.pbs.lab"
    history: bool = True  # job_history_enable
    nodes: tuple[str, ...] = ("x3001c0s1b0n0.hsn.cm.pbs.lab", "x3001c0s1b1n0.hsn.cm.pbs.lab")
    node_ncpus: int = 64
    node_ngpus: int = 4
    system: str = "polaris"
    default_queue: str = "workq"
    default_chunk_ncpus: int = 1  # ALCF's is a whole node
    default_chunk_ngpus: int = 0
    alcf_hook: bool = False  # demands account, walltime and file systems; forces -k doe
    kill_delay_s: float = 10.0
    obituary_s: float = 8.0  # from SIGTERM to the job's end, however soon its processes are gone
    poll_s: float = 0.05  # the mom looks this often whether the walltime is over; the real one minutes
    keeper_pid: int = 0  # jobs are killed when this process is gone
    # For rehearsals: any queue and resource is taken, each chunk has a node of its own as long as there are
    # nodes, and jobs start by `schedule`.
    any_site: bool = False
    walltime_s: int = 0  # in the place of what jobs ask for
    max_jobs: int = 0  # further jobs are held


@dataclass(frozen=True)
class Queue:
    """As on the server that the facts were recorded on."""

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


def folder() -> Path:
    """The stand-in's folder; everything that is not a user's own file lies below it."""
    return Path(os.environ[FOLDER_VARIABLE])


def write_settings(root: Path, settings: Settings) -> None:
    """For all commands and daemons of the machine below `root`."""
    (root / "settings.json").write_text(json.dumps(asdict(settings)))


def read_settings(root: Path) -> Settings:
    """What was written last."""
    values = json.loads((root / "settings.json").read_text())
    return replace(Settings(), **{**values, "nodes": tuple(values["nodes"])})


def start_mom(root: Path, number: int) -> None:
    """The process that runs the job, unless whoever rehearses calls `schedule`."""
    if not read_settings(root).any_site:
        jobs.start_daemon(root, "ddp_hpc.rehearse.pbs.mom", number, {FOLDER_VARIABLE: str(root)})


def schedule(root: Path) -> None:
    """Starts the jobs whose turn it is, and holds those beyond `max_jobs`. For rehearsals."""
    release(root)
    max_jobs = read_settings(root).max_jobs
    for number in jobs.numbers(root):
        job = load(root, number)
        if job["job_state"] != "Q" or job["substate"] != 10 or "_started" in job:
            continue
        if max_jobs and number >= FIRST_JOB + max_jobs:
            save(root, number, {**job, "job_state": "H", "comment": NO_MORE_JOBS})
            continue
        save(root, number, {**job, "_started": True})
        jobs.start_daemon(root, "ddp_hpc.rehearse.pbs.mom", number, {FOLDER_VARIABLE: str(root)})


def release(root: Path) -> None:
    """Starts the jobs that wait for others which are over by now. Called wherever a job comes or ends."""
    with jobs.locked(root / "release.lock"):
        for number in jobs.numbers(root):
            job = load(root, number)
            if (
                job["job_state"] != "H"
                or "comment" in job
                or "depend" not in job
                or delete_request(root, number).exists()
            ):
                continue
            words = {_word(kind, load(root, before)) for kind, before in job["_after"]}
            if "drop" in words:
                drop(root, number)
            elif words <= {"go"}:
                jobs.change(root, number, job_state="Q", Hold_Types="n", substate=10)
                start_mom(root, number)


def _word(kind: str, before: jobs.Attributes) -> str:
    """What a dependency says of the job that waits: go, wait or drop."""
    if kind == "after":
        return "go" if "stime" in before else "wait"
    if before["job_state"] != "F":
        return "wait"
    ended_well = before.get("Exit_status") == 0
    return "go" if kind == "afterany" or (kind == "afterok") == ended_well else "drop"


def drop(root: Path, number: int) -> None:
    """job_abt: over without a word; no Exit_status, no stime, no comment."""
    now = int(time.time())
    jobs.change(root, number, job_state="F", substate=92, history_timestamp=now)


def depends_on(root: Path, number: int, after: Sequence[tuple[str, int]]) -> None:
    """Registers a job with those that it waits for: it is dropped where the server does not know one."""
    settings = read_settings(root)
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
    """False for a job that never was, and for one that has ended where no history is kept."""
    if not jobs.job_file(root, number).exists():
        return False
    return settings.history or load(root, number)["job_state"] != "F"


def clock(seconds: int) -> str:
    """As PBS writes a duration."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def job_id(number: int, server: str) -> str:
    """`12.pbs-srv`, or `12[3].pbs-srv` of a subjob; those of an array are numbered behind a million."""
    array, index = divmod(number, _SUBJOBS)
    return f"{array}[{index - 1}].{server}" if array else f"{number}.{server}"


def subjob(array: int, index: int) -> int:
    """The number of one job of an array."""
    return array * _SUBJOBS + index + 1


def array_state(root: Path, number: int, job: jobs.Attributes) -> jobs.Attributes:
    """An array as it is: begun until its last job is over. Its Exit_status says nothing of theirs."""
    states = [load(root, subjob(number, index))["job_state"] for index in job["_indices"]]
    if all(state == "F" for state in states):
        return {**job, "job_state": "F", "substate": 92, "Exit_status": 0}
    begun = any(state in "RF" for state in states)
    return {**job, "job_state": "B"} if begun and job["job_state"] != "F" else job


def job_number(command: str, word: str, root: Path) -> int:
    """The number of an existing job, from `12` or `12.pbs-srv`.

    Raises:
        RefusedError: as the real commands do.
    """
    head = word.partition(".")[0]
    match = re.fullmatch(r"([0-9]{1,6})(\[([0-9]{0,4})\])?", head)
    if match is None:
        raise RefusedError(f"{command}: illegally formed job identifier: {word}", 1)
    settings = read_settings(root)
    number = subjob(int(match[1]), int(match[3])) if match[3] else int(match[1])
    is_array = is_known(root, number, settings) and "_indices" in load(root, number)
    if not is_known(root, number, settings) or is_array != (match[2] == "[]"):
        raise RefusedError(f"{command}: Unknown Job Id {head}.{settings.server}", UNKNOWN_JOB)
    return number


def fail(error: RefusedError) -> NoReturn:
    """Ends a command."""
    sys.stderr.write(f"{error}\n")
    sys.exit(error.exit_code)


def run(command: Any, argv: list[str], environ: Mapping[str, str]) -> NoReturn:
    """A command's frame: its refusals become stderr and exit code."""
    root = folder()
    try:
        if (root / DOWN).exists():
            name = Path(command.__code__.co_filename).stem
            words = f"cannot connect to server {read_settings(root).server} (errno=111)"
            raise RefusedError(f"Connection refused\n{name}: {words}", 255 if name == "qstat" else 111)
        command(argv, environ)
    except RefusedError as error:
        fail(error)
    sys.exit(0)
