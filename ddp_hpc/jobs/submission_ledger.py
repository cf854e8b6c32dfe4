"""What a run folder remembers of its jobs: who submitted what and when, and each start.

`submitted` has one JSON object a line, written by `ddp-hpc submit`; `attempts` one line a
start, `ATTEMPT JOBID STEP UNIX_S`, written by the job scripts; `cancelled` the numbers of jobs that
`ddp-hpc cancel` has ended since the last start. There is no other data base:
a job's run folder is found from what the scheduler knows of the job.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ddp_hpc.errors import DdpHpcError
from ddp_hpc.lint.parse_script import MAX_CHARS, parse_script
from ddp_hpc.partial_files import write_atomically
from ddp_hpc.schedulers.job_state import JobState, is_job_id, same_job

SUBMITTED, ATTEMPTS, CANCELLED = "submitted", "attempts", "cancelled"
# Thousands of starts; a longer file is something else.
_MAX_BYTES = 4 * 1024 * 1024
# Some 30,000 years: more than that, and no clock of this machine can show it.
_MAX_S = 10**12
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
    _append(folder / SUBMITTED, f"{json.dumps(asdict(submission))}\n".encode())


def record_cancelled(folder: Path, job_id: str) -> None:
    """Tells the job's script that it was cancelled: it submits no successor then, whenever the signal comes.

    Raises:
        DdpHpcError: it cannot be written.
    """
    _append(folder / CANCELLED, f"{_number_of(job_id)}\n".encode())


def forget_cancelled(folder: Path, job_id: str) -> None:
    """Takes back `record_cancelled`, as the scheduler has refused; no error where nothing was recorded."""
    with suppress(DdpHpcError):
        kept = [line for line in _lines(folder / CANCELLED) if line != _number_of(job_id)]
        content = "".join(f"{line}\n" for line in kept).encode()
        write_atomically(folder / CANCELLED, content, CANCELLED, is_private=True)


def _number_of(job_id: str) -> str:
    return re.split("[.@]", job_id)[0]


def _append(path: Path, line: bytes) -> None:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(handle).st_size
            # A line that was cut short must not spoil this one.
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line
            written = os.write(handle, line)
        finally:
            os.close(handle)
    except OSError as error:
        raise DdpHpcError(f"{path}: cannot be written") from error
    if written < len(line):
        raise DdpHpcError(f"{path}: {written} of {len(line)} bytes could be written; look at the quota")


def submissions(folder: Path) -> list[Submission]:
    """The ledger's lines, oldest first; a damaged line is passed over."""
    found = []
    for line in _lines(folder / SUBMITTED):
        try:
            one = json.loads(line)
            known = {field.name: one[field.name] for field in fields(Submission)}
            at_s, argv = known.pop("at_s"), known.pop("argv")
            words = {key: str(value) for key, value in known.items()}
            in_time = isinstance(at_s, int) and 0 <= at_s < _MAX_S
            if in_time and isinstance(argv, list) and is_job_id(words["job_id"]):
                found.append(Submission(**words, at_s=at_s, argv=tuple(map(str, argv))))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


def submission_of(folder: Path, job_id: str) -> Submission | None:
    """How that job was queued; None where it was not by `ddp-hpc submit`."""
    return next((one for one in reversed(submissions(folder)) if same_job(one.job_id, job_id)), None)


def attempts(folder: Path) -> list[Attempt]:
    """The starts, oldest first; a damaged line is passed over.

    A job knows its number alone: of which cluster it is, the ledger tells.
    """
    clusters = {
        number: at + cluster for number, at, cluster in (s.job_id.partition("@") for s in submissions(folder))
    }
    found, cluster = [], ""
    for match in filter(None, map(_ATTEMPT.fullmatch, _lines(folder / ATTEMPTS))):
        # A successor is queued on the cluster of the job before it.
        cluster = clusters.get(match[2], cluster)
        job_id = match[2] + cluster
        found.append(
            Attempt(number=int(match[1]), job_id=job_id, first_step=int(match[3]), at_s=int(match[4]))
        )
    return found


def job_ids(folder: Path) -> list[str]:
    """Every job of the folder once, in the order in which it is first spoken of."""
    first_seen = [(s.at_s, s.job_id) for s in submissions(folder)]
    first_seen += [(a.at_s, a.job_id) for a in attempts(folder)]
    return list(dict.fromkeys(job_id for _, job_id in sorted(first_seen, key=lambda one: one[0])))


def chained_job(folder: Path, job_id: str) -> str:
    """The job that was queued to start after this one; empty where there is none."""
    waiting = (one for one in reversed(submissions(folder)) if one.after and same_job(one.after, job_id))
    return next((one.job_id for one in waiting), "")


def next_job(folder: Path, job_id: str) -> str:
    """The job that goes on after this one, as far as the folder knows; empty where there is none."""
    if chained := chained_job(folder, job_id):
        return chained
    starts = attempts(folder)
    own = [index for index, start in enumerate(starts) if same_job(start.job_id, job_id)]
    later = starts[own[-1] + 1 :] if own else []
    # A number of 1 begins a run anew.
    return later[0].job_id if later and later[0].number > 1 and is_job_id(later[0].job_id) else ""


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
        named = run_dir_in(text, Path(job.work_dir))
        return named if named is not None and named.is_dir() else None
    except OSError:
        return None


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
    else:  # a run here may hold the same number from another machine, or from years ago
        yield from reversed(runs_in(here))


def _is_run(folder: Path) -> bool:
    try:
        return any((folder / name).is_file() for name in (SUBMITTED, ATTEMPTS))
    except OSError:  # one folder that is closed to us must not hide the others
        return False


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
