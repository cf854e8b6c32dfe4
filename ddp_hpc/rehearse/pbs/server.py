"""The stand-in's server: its settings, its folder, and one JSON file for each job."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.jobs import delete_request, load, save
from ddp_hpc.rehearse.launchers.options import RefusedError

FOLDER_VARIABLE = "PBS_STAND_IN_HOME"
FIRST_JOB = 12
NO_MORE_JOBS = "job held, the machine runs no more jobs"

# PBS error numbers, of which the commands return the lowest byte (pbs_error.h).
FINISHED, UNKNOWN_JOB = 35, 153


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What qmgr would set. The nodes are names only: everything runs on this machine."""

    server: str = "pbs-srv"
    nodes: tuple[str, ...] = ("x3001c0s1b0n0.hsn.cm.pbs.lab", "x3001c0s1b1n0.hsn.cm.pbs.lab")
    node_ncpus: int = 64
    node_ngpus: int = 4
    system: str = "polaris"
    default_queue: str = "workq"
    default_chunk_ncpus: int = 1  # ALCF's is a whole node
    default_chunk_ngpus: int = 0
    alcf_hook: bool = False  # demands account, walltime and file systems; forces -k doe
    kill_delay_s: float = 10.0
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
            if all(load(root, before)["job_state"] == "F" for before in job["_after"]):
                save(root, number, {**job, "job_state": "Q", "Hold_Types": "n"})
                start_mom(root, number)


def job_number(command: str, word: str, root: Path) -> int:
    """The number of an existing job, from `12` or `12.pbs-srv`.

    Raises:
        RefusedError: as the real commands do.
    """
    head = word.partition(".")[0]
    if not head.isdecimal():
        raise RefusedError(f"{command}: illegally formed job identifier: {word}", 1)
    if not jobs.job_file(root, int(head)).exists():
        server = read_settings(root).server
        raise RefusedError(f"{command}: Unknown Job Id {head}.{server}", UNKNOWN_JOB)
    return int(head)


def fail(error: RefusedError) -> NoReturn:
    """Ends a command."""
    sys.stderr.write(f"{error}\n")
    sys.exit(error.exit_code)


def run(command: Any, argv: list[str], environ: Mapping[str, str]) -> NoReturn:
    """A command's frame: its refusals become stderr and exit code."""
    try:
        command(argv, environ)
    except RefusedError as error:
        fail(error)
    sys.exit(0)
