"""The job records of a stand-in: one JSON file per job, and files that request the end of a job."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddp_hpc.rehearse.processes import PACKAGES

Attributes = dict[str, Any]

_MAIN = "import sys; sys.path.insert(0, sys.argv[1]); from {module} import main; main(sys.argv[2])"


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
    """Holds a lock on `path` during the block, so that only one process executes it at a time."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def job_file(root: Path, number: int) -> Path:
    """Returns the file with the attributes of a job."""
    return root / "jobs" / f"{number}.json"


def numbers(root: Path) -> list[int]:
    """Returns the numbers of all submitted jobs, in ascending order."""
    return sorted(int(path.stem) for path in (root / "jobs").glob("*.json"))


def delete_request(root: Path, number: int) -> Path:
    """Returns the file that requests the end of a job from its daemon."""
    return root / "jobs" / f"{number}.delete"


def rerun_request(root: Path, number: int) -> Path:
    """Returns the file that requests a requeue of a job from its daemon."""
    return root / "jobs" / f"{number}.rerun"


def save(root: Path, number: int, job: Attributes) -> None:
    """Replaces the attributes of a job atomically."""
    path = job_file(root, number)
    path.parent.mkdir(exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(json.dumps(job))
    new.replace(path)


def change(root: Path, number: int, **attributes: object) -> Attributes:
    """Sets these attributes, keeps concurrent changes by other processes, and returns all attributes."""
    with locked(root / "jobs.lock"):
        job = {**load(root, number), **attributes}
        save(root, number, job)
    return job


def load(root: Path, number: int) -> Attributes:
    """Returns the attributes of a job."""
    attributes: Attributes = json.loads(job_file(root, number).read_text())
    return attributes


def start_daemon(root: Path, module: str, number: int, environ: Mapping[str, str]) -> None:
    """Starts a process in a new session that runs one job. Its errors are written to `mom.N.log`."""
    code = _MAIN.format(module=module)
    with (root / f"mom.{number}.log").open("a") as log:
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, str(PACKAGES), str(number)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", **environ},
        )
