"""The jobs of a simulated scheduler: one JSON file per job, and files that request its end or requeue."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddp_hpc.base.process_control import PACKAGES
from ddp_hpc.rehearse import start_stand_in
from ddp_hpc.rehearse.launchers.options import RefusedError

Attributes = dict[str, Any]

# Subjob I of array N of PBS has the internal number N * SUBJOBS + I + 1.
SUBJOBS = 10**6


def next_number(path: Path, first: int) -> int:
    """Returns the next number of the counter in this file. Concurrent callers get different numbers."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        number = int(file.read() or first)
        file.truncate(0)
        file.write(str(number + 1))
    return number


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks the file `path` during the block. Other processes wait for the lock."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def job_file(root: Path, number: int) -> Path:
    """Returns the file with the attributes of a job."""
    return root / "jobs" / f"{number}.json"


def numbers(root: Path) -> list[int]:
    """Returns the numbers of all jobs, in the order of submission."""
    known = (int(path.stem) for path in (root / "jobs").glob("*.json"))
    return sorted(known, key=lambda number: (sequence_number(number), number))


def sequence_number(number: int) -> int:
    """Returns the number in the ID of a job, which all subjobs of an array share."""
    return number // SUBJOBS or number


def delete_request(root: Path, number: int) -> Path:
    """Returns the file whose existence makes the daemon of a job end the job."""
    return root / "jobs" / f"{number}.delete"


def rerun_request(root: Path, number: int) -> Path:
    """Returns the file that makes the daemon of a job requeue it."""
    return root / "jobs" / f"{number}.rerun"


def save(root: Path, number: int, job: Attributes) -> None:
    """Replaces the attributes of a job atomically."""
    path = job_file(root, number)
    path.parent.mkdir(exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(json.dumps(job))
    new.replace(path)


def change(root: Path, number: int, **attributes: object) -> Attributes:
    """Sets attributes of a job without losing concurrent changes; returns all its attributes."""
    with locked(root / "jobs.lock"):
        job = {**load(root, number), **attributes}
        save(root, number, job)
    return job


def load(root: Path, number: int) -> Attributes:
    """Returns the attributes of a job."""
    attributes: Attributes = json.loads(job_file(root, number).read_text())
    return attributes


def find_job(word: str, root: Path, message: str) -> int:
    """Returns the number of an existing Slurm job; a task of an array is `12_3`.

    Raises:
        RefusedError: the job does not exist. The error has the given message.
    """
    match = re.fullmatch(r"([0-9]{1,18})(?:_([0-9]{1,7}))?", word)
    if match is None or not job_file(root, int(match[1])).exists():
        raise RefusedError(message)
    if match[2] and load(root, int(match[1])).get("array_index") != int(match[2]):
        raise RefusedError(message)
    return int(match[1])


def save_script(path: Path, text: str) -> None:
    """Writes the copy of a script that the scheduler runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    path.chmod(0o700)


def start_daemon(root: Path, module: str, number: int) -> None:
    """Starts a process in a new session that runs one job. Its errors are written to `mom.N.log`."""
    code = start_stand_in.CODE.format(what="daemon")
    with (root / f"mom.{number}.log").open("a") as log:
        daemon = subprocess.Popen(
            [
                sys.executable,
                *start_stand_in.PYTHON_OPTIONS,
                code,
                str(PACKAGES),
                module,
                str(root),
                str(number),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
        )
    (root / f"mom.{number}.pid").write_text(str(daemon.pid))


def daemons(root: Path) -> set[int]:
    """Returns the process IDs of all daemons.

    A daemon that a job has started with a submit command is a descendant of that job, but not a part of it.
    """
    return {int(path.read_text() or 0) for path in root.glob("mom.*.pid")}
