"""The stand-in's server: its settings, its folder, and one JSON file for each job."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

FOLDER_VARIABLE = "PBS_STAND_IN_HOME"
FIRST_JOB = 12

# PBS error numbers, of which the commands return the lowest byte (pbs_error.h).
FINISHED, UNKNOWN_JOB = 35, 153

Attributes = dict[str, Any]


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


class Refused(Exception):
    """A command ends with this line on stderr and this exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def folder() -> Path:
    """The stand-in's folder; everything that is not a user's own file lies below it."""
    return Path(os.environ[FOLDER_VARIABLE])


def write_settings(root: Path, settings: Settings) -> None:
    (root / "settings.json").write_text(json.dumps(asdict(settings)))


def read_settings(root: Path) -> Settings:
    values = json.loads((root / "settings.json").read_text())
    return replace(Settings(), **{**values, "nodes": tuple(values["nodes"])})


def new_number(root: Path) -> int:
    """The next job's number, also where several qsub run at once."""
    with (root / "next_job").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        number = int(file.read() or FIRST_JOB)
        file.truncate(0)
        file.write(str(number + 1))
    return number


def job_file(root: Path, number: int) -> Path:
    return root / "jobs" / f"{number}.json"


def delete_request(root: Path, number: int) -> Path:
    """The file by which qdel tells the job's mom to end it."""
    return root / "jobs" / f"{number}.delete"


def rerun_request(root: Path, number: int) -> Path:
    """The file by which a job's mom is told to end it and run it again; it holds the grace in seconds."""
    return root / "jobs" / f"{number}.rerun"


def start_mom(root: Path, number: int) -> None:
    """The process that runs the job."""
    project = Path(__file__).resolve().parents[3]
    words = [sys.executable, "-I", "-S", "-c", _MOM, str(project), str(number)]
    with (root / f"mom.{number}.log").open("a") as log:
        subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={FOLDER_VARIABLE: str(root), "PATH": "/usr/bin:/bin"},
        )


_MOM = "import sys; sys.path.insert(0, sys.argv[1]); from tests.fakes.pbs.mom import main; main(sys.argv[2])"


def release(root: Path) -> None:
    """Starts the jobs that wait for others which are over by now. Called wherever a job comes or ends."""
    with _locked(root / "release.lock"):
        for path in sorted((root / "jobs").glob("*.json")):
            number = int(path.stem)
            job = load(root, number)
            if job["job_state"] != "H" or "depend" not in job or delete_request(root, number).exists():
                continue
            if all(load(root, before)["job_state"] == "F" for before in job["_after"]):
                save(root, number, {**job, "job_state": "Q", "Hold_Types": "n"})
                start_mom(root, number)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def save(root: Path, number: int, job: Attributes) -> None:
    """Readers see the old attributes or the new ones, never half of them."""
    path = job_file(root, number)
    path.parent.mkdir(exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(json.dumps(job))
    new.replace(path)


def load(root: Path, number: int) -> Attributes:
    attributes: Attributes = json.loads(job_file(root, number).read_text())
    return attributes


def job_number(command: str, word: str, root: Path) -> int:
    """The number of an existing job, from `12` or `12.pbs-srv`.

    Raises:
        Refused: as the real commands do.
    """
    head = word.partition(".")[0]
    if not head.isdecimal():
        raise Refused(f"{command}: illegally formed job identifier: {word}", 1)
    if not job_file(root, int(head)).exists():
        server = read_settings(root).server
        raise Refused(f"{command}: Unknown Job Id {head}.{server}", UNKNOWN_JOB)
    return int(head)


def fail(error: Refused) -> NoReturn:
    sys.stderr.write(f"{error}\n")
    sys.exit(error.exit_code)


def run(command: Any, argv: list[str], environ: Mapping[str, str]) -> NoReturn:
    """A command's frame: its refusals become stderr and exit code."""
    try:
        command(argv, environ)
    except Refused as error:
        fail(error)
    sys.exit(0)
