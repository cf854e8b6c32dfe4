"""The record of the jobs of a run in its run directory: submissions, attempts and cancellations.

`ddp-hpc submit` writes one JSON object per line to `submitted`. Job scripts write one line per start,
`ATTEMPT JOBID STEP UNIX_S`, to `attempts`. `ddp-hpc cancel` writes the numbers of the jobs that it has
cancelled since the last start to `cancelled`. There is no other database: the run directory of a job is
determined from what the scheduler knows about the job.
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
# Enough for thousands of starts. Only the end of a longer file is read.
_MAX_BYTES = 4 * 1024 * 1024
# About 30,000 years; functions of `time` fail for larger values.
_MAX_S = 10**12
_ATTEMPT = re.compile(r"([1-9][0-9]{0,5}) (\S+) (0|[1-9][0-9]{0,14}) ([0-9]{1,12})")
_RUN_DIR = "DDP_HPC_RUN_DIR"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One job as it was queued. `after` is the job of the same chain on which it depends, or empty."""

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
    """One start of a job script. `first_step` is the step of the snapshot from which it resumed."""

    number: int
    job_id: str
    first_step: int
    at_s: int


def record(run_dir: Path, submission: Submission) -> None:
    """Appends a line to the record of submissions in one write.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    _append(run_dir / SUBMITTED, f"{json.dumps(asdict(submission))}\n".encode())


def record_cancelled(run_dir: Path, job_id: str) -> None:
    """Records that a job was cancelled, so that its script submits no successor.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    _append(run_dir / CANCELLED, f"{_number_of(job_id)}\n".encode())


def forget_cancelled(run_dir: Path, job_id: str) -> None:
    """Reverts `record_cancelled` after the scheduler refused to cancel the job. Errors are ignored."""
    with suppress(DdpHpcError):
        kept = [line for line in _lines(run_dir / CANCELLED) if line != _number_of(job_id)]
        content = "".join(f"{line}\n" for line in kept).encode()
        write_atomically(run_dir / CANCELLED, content, CANCELLED, is_private=True)


def _number_of(job_id: str) -> str:
    return re.split("[.@]", job_id)[0]


def _append(path: Path, line: bytes) -> None:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(handle).st_size
            # If the last line is incomplete, begin a new line before this one.
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line
            written = os.write(handle, line)
        finally:
            os.close(handle)
    except OSError as error:
        raise DdpHpcError(f"{path} cannot be written") from error
    if written < len(line):
        raise DdpHpcError(f"{path}: only {written} of {len(line)} bytes could be written; check the quota")


def submissions(run_dir: Path) -> list[Submission]:
    """Returns the recorded submissions, oldest first. Damaged lines are skipped."""
    found = []
    for line in _lines(run_dir / SUBMITTED):
        try:
            one = json.loads(line)
            known = {field.name: one[field.name] for field in fields(Submission)}
            at_s, argv = known.pop("at_s"), known.pop("argv")
            strings = {key: str(value) for key, value in known.items()}
            in_time = isinstance(at_s, int) and 0 <= at_s < _MAX_S
            if in_time and isinstance(argv, list) and is_job_id(strings["job_id"]):
                found.append(Submission(**strings, at_s=at_s, argv=tuple(map(str, argv))))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


def submission_of(run_dir: Path, job_id: str) -> Submission | None:
    """Returns the submission of a job; None if it was not queued by `ddp-hpc submit`."""
    return next((one for one in reversed(submissions(run_dir)) if same_job(one.job_id, job_id)), None)


def attempts(run_dir: Path) -> list[Attempt]:
    """Returns the recorded starts, oldest first. Damaged lines are skipped.

    A job script records only the number of its job. The cluster is taken from the recorded submissions.
    """
    clusters = {
        number: at + cluster
        for number, at, cluster in (s.job_id.partition("@") for s in submissions(run_dir))
    }
    found, cluster = [], ""
    for match in filter(None, map(_ATTEMPT.fullmatch, _lines(run_dir / ATTEMPTS))):
        # A successor is queued on the cluster of the job before it.
        cluster = clusters.get(match[2], cluster)
        job_id = match[2] + cluster
        found.append(
            Attempt(number=int(match[1]), job_id=job_id, first_step=int(match[3]), at_s=int(match[4]))
        )
    return found


def job_ids(run_dir: Path) -> list[str]:
    """Returns the distinct jobs in the run directory, in the order in which they were first recorded."""
    first_seen = [(s.at_s, s.job_id) for s in submissions(run_dir)]
    first_seen += [(a.at_s, a.job_id) for a in attempts(run_dir)]
    return list(dict.fromkeys(job_id for _, job_id in sorted(first_seen, key=lambda one: one[0])))


def chained_job(run_dir: Path, job_id: str) -> str:
    """Returns the job that was queued to start after this one, or an empty string."""
    waiting = (one for one in reversed(submissions(run_dir)) if one.after and same_job(one.after, job_id))
    return next((one.job_id for one in waiting), "")


def next_job(run_dir: Path, job_id: str) -> str:
    """Returns the job that resumes the run after this one according to the run directory, or nothing."""
    if chained := chained_job(run_dir, job_id):
        return chained
    starts = attempts(run_dir)
    own = [index for index, start in enumerate(starts) if same_job(start.job_id, job_id)]
    later = starts[own[-1] + 1 :] if own else []
    # Attempt 1 starts a new run.
    return later[0].job_id if later and later[0].number > 1 and is_job_id(later[0].job_id) else ""


def run_dir_in(text: str, work_dir: Path) -> Path | None:
    """Returns the run directory that a script of ddp-hpc sets; None if the script sets no fixed directory."""
    values = [value for _, name, value in parse_script(text).assignments if name == _RUN_DIR]
    if not values:
        return None
    value = re.sub(r"^\$(?:PWD|\{PWD\})(?=/|$)", lambda _: str(work_dir), values[-1])
    return Path(value) if value.startswith("/") and not re.search(r"[$`\0]", value) else None


def find_run_dir(job_id: str, job: JobState | None, here: Path) -> Path | None:
    """Returns the run directory of a job; None if it is unknown. `job` is its state in the scheduler."""
    for run_dir in _candidates(job, here):
        if any(same_job(known, job_id) for known in job_ids(run_dir)):
            return run_dir
    if job is None or not job.script or not job.work_dir:
        return None
    # For a job that has not started and was not queued by `ddp-hpc submit`, read the script.
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


def runs_in(directory: Path) -> list[Path]:
    """Yields the run directories in `directory`/runs, and `directory` itself if it is one; newest last."""
    try:
        found = [one for one in [directory, *sorted((directory / "runs").glob("*"))] if _is_run(one)]
    except OSError:
        return []
    return sorted(found, key=_last_s)


def _candidates(job: JobState | None, here: Path) -> Iterator[Path]:
    if job is not None and job.script:
        yield Path(job.script).parent  # successors run the copy of the script in the run directory
    if job is not None and job.work_dir:
        yield from reversed(runs_in(Path(job.work_dir)))
    else:  # here, a run can have the same job id from another machine or from years ago
        yield from reversed(runs_in(here))


def _is_run(run_dir: Path) -> bool:
    try:
        return any((run_dir / name).is_file() for name in (SUBMITTED, ATTEMPTS))
    except OSError:  # skip a directory without permission, but list the others
        return False


def _last_s(run_dir: Path) -> int:
    times = [*(one.at_s for one in submissions(run_dir)), *(one.at_s for one in attempts(run_dir))]
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
