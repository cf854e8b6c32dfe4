"""What a run folder remembers of its jobs: who submitted what and when, and each start.

`submitted` has one JSON object a line, written by `ddp-hpc submit`; `attempts` one line a
start, `ATTEMPT JOBID STEP UNIX_S`, written by the job scripts. There is no other data base:
a job's run folder is found from what the scheduler knows of the job.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ddp_hpc.batch.script import MAX_CHARS, parse_script
from ddp_hpc.errors import DdpHpcError
from ddp_hpc.queue.job_state import JobState, same_job

SUBMITTED, ATTEMPTS = "submitted", "attempts"
# Thousands of starts; a longer file is something else.
_MAX_BYTES = 4 * 1024 * 1024
_ATTEMPT = re.compile(r"([1-9][0-9]{0,5}) (\S+) (0|[1-9][0-9]{0,14}) ([0-9]{1,12})")
_RUN_DIR = "DDP_HPC_RUN_DIR"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One job as it was queued. `after`: the job of the same chain that it waits for, or empty."""

    job_id: str
    scheduler: str
    user: str
    host: str
    at_s: int
    argv: tuple[str, ...]
    script: str
    sha256: str
    work_dir: str
    after: str = ""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a job script; `first_step`: of the snapshot from which it went on."""

    number: int
    job_id: str
    first_step: int
    at_s: int


def record(folder: Path, submission: Submission) -> None:
    """Adds a line to the folder's ledger, at once and whole.

    Raises:
        DdpHpcError: it cannot be written.
    """
    line = json.dumps(asdict(submission)) + "\n"
    try:
        handle = os.open(folder / SUBMITTED, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)
    except OSError as error:
        raise DdpHpcError(f"{folder / SUBMITTED}: cannot be written") from error


def submissions(folder: Path) -> list[Submission]:
    """The ledger's lines, oldest first; a damaged line is passed over."""
    found = []
    for line in _lines(folder / SUBMITTED):
        try:
            one = json.loads(line)
            known = {field.name: one[field.name] for field in fields(Submission)}
            if isinstance(known["at_s"], int) and isinstance(known["argv"], list):
                words = {key: str(value) for key, value in known.items() if key not in ("at_s", "argv")}
                argv = tuple(map(str, known["argv"]))
                found.append(Submission(**words, at_s=known["at_s"], argv=argv))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


def submission_of(folder: Path, job_id: str) -> Submission | None:
    """How that job was queued; None where it was not by `ddp-hpc submit`."""
    return next((one for one in submissions(folder) if same_job(one.job_id, job_id)), None)


def attempts(folder: Path) -> list[Attempt]:
    """The starts, oldest first; a damaged line is passed over."""
    matches = filter(None, map(_ATTEMPT.fullmatch, _lines(folder / ATTEMPTS)))
    return [Attempt(number=int(m[1]), job_id=m[2], first_step=int(m[3]), at_s=int(m[4])) for m in matches]


def job_ids(folder: Path) -> list[str]:
    """Every job of the folder once, in the order in which it is first spoken of."""
    first_seen = [(s.at_s, s.job_id) for s in submissions(folder)]
    first_seen += [(a.at_s, a.job_id) for a in attempts(folder)]
    return list(dict.fromkeys(job_id for _, job_id in sorted(first_seen, key=lambda one: one[0])))


def next_job(folder: Path, job_id: str) -> str:
    """The job that goes on after this one, as far as the folder knows; empty where there is none."""
    for submission in submissions(folder):
        if submission.after and same_job(submission.after, job_id):
            return submission.job_id
    starts = attempts(folder)
    own = [index for index, start in enumerate(starts) if same_job(start.job_id, job_id)]
    later = starts[own[-1] + 1 :] if own else []
    # A number of 1 begins a run anew.
    return later[0].job_id if later and later[0].number > 1 else ""


def run_dir_in(text: str, work_dir: Path) -> Path | None:
    """The run folder that a script of ddp-hpc names; None where it names none or only its job knows."""
    values = [value for _, name, value in parse_script(text).assignments if name == _RUN_DIR]
    if not values:
        return None
    value = re.sub(r"^\$(?:PWD|\{PWD\})(?=/|$)", lambda _: str(work_dir), values[-1])
    return Path(value) if value.startswith("/") and not re.search(r"[$`\0]", value) else None


def find_run_dir(job_id: str, job: JobState | None, here: Path) -> Path | None:
    """The run folder of a job; `job` is what the scheduler knows of it. None where nobody tells."""
    for folder in _candidates(job, here):
        if any(same_job(known, job_id) for known in job_ids(folder)):
            return folder
    if job is None or not job.script or not job.work_dir:
        return None
    # Of a script that has not started, and was not queued by `ddp-hpc submit`.
    script = Path(job.script)
    try:
        if not script.is_file():
            return None
        with script.open("rb") as file:
            text = file.read(MAX_CHARS).decode("utf-8", "surrogateescape")
    except OSError:
        return None
    named = run_dir_in(text, Path(job.work_dir))
    return named if named is not None and named.is_dir() else None


def runs_in(folder: Path) -> list[Path]:
    """The run folders in `folder`/runs, and `folder` itself if it is one, the newest last."""
    try:
        found = [one for one in [folder, *sorted((folder / "runs").glob("*"))] if _is_run(one)]
    except OSError:
        return []
    return sorted(found, key=_last_s)


def _candidates(job: JobState | None, here: Path) -> Iterator[Path]:
    if job is not None and job.script:
        yield Path(job.script).parent  # a successor is queued from the folder's own copy
    if job is not None and job.work_dir:
        yield from reversed(runs_in(Path(job.work_dir)))
    yield from reversed(runs_in(here))


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (SUBMITTED, ATTEMPTS))


def _last_s(folder: Path) -> int:
    times = [*(one.at_s for one in submissions(folder)), *(one.at_s for one in attempts(folder))]
    return max(times, default=0)


def _lines(path: Path) -> list[str]:
    try:
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MAX_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
