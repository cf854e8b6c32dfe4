"""The record of the jobs of a run in its run directory: submissions, attempts and cancellations.

`ddp-hpc submit` writes one JSON object per line to `submitted`. Job scripts write one line per start,
`ATTEMPT JOBID STEP UNIX_S`, to `attempts`. `ddp-hpc cancel` writes the IDs of the jobs that it has cancelled
since the last start to `cancelled`. `resume` contains the command that resumes a run for which no job is
known to be queued. There is no other database: `run_directories` finds the run directory of a job.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from ddp_hpc.base.atomic_files import append_line, write_atomically
from ddp_hpc.base.attempt_end import ATTEMPTS
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.queue.log_files import is_plain
from ddp_hpc.schedulers.job_state import is_job_id, same_job

SUBMITTED, CANCELLED, RESUME = "submitted", "cancelled", "resume"
JOB = "job.sh"
"""The copy of the script of the last job that has started."""
# Enough for thousands of starts. If a file is larger, only its end is read.
_MAX_BYTES = 4 * 1024 * 1024
# About 30,000 years; functions of the module `time` fail for larger values.
_MAX_S = 10**12
_ATTEMPT = re.compile(r"([1-9][0-9]{0,5}) (\S+) (0|[1-9][0-9]{0,14}) ([0-9]{1,12})")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in a container
        return str(os.getuid())


@dataclass(frozen=True, kw_only=True)
class SubmissionRecord:
    """One job as it was queued, by default now by this process. `sha256` is the checksum of its script.
    `after` is the job whose run it resumes, or empty.
    """

    job_id: str
    scheduler: str
    user: str = field(default_factory=_user)
    host: str = field(default_factory=socket.gethostname)
    at_s: int = field(default_factory=lambda: int(time.time()))
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

    @property
    def key(self) -> str:
        """The first two words of the line in `attempts`, which are also the value of DDP_HPC_THIS_ATTEMPT."""
        return f"{self.number} {self.job_id}"


def parse_attempt(line: str) -> Attempt | None:
    """Returns the start that a line of `attempts` records; None if the line is damaged."""
    match = _ATTEMPT.fullmatch(line)
    if match is None:
        return None
    return Attempt(number=int(match[1]), job_id=match[2], first_step=int(match[3]), at_s=int(match[4]))


def record_attempt(run_dir: Path, attempt: Attempt) -> None:
    """Appends a line to the record of starts.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    append_line(run_dir / ATTEMPTS, f"{attempt.key} {attempt.first_step} {attempt.at_s}".encode())


def record(run_dir: Path, submission: SubmissionRecord) -> None:
    """Appends a line to the record of submissions in one write.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    append_line(run_dir / SUBMITTED, json.dumps(asdict(submission)).encode())


def record_cancelled(run_dir: Path, job_id: str) -> None:
    """Records that a job was cancelled, so that its script submits no successor.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    append_line(run_dir / CANCELLED, _number_of(job_id).encode())


def is_cancelled(run_dir: Path, job_id: str) -> bool:
    """Returns whether `ddp-hpc cancel` has cancelled the job."""
    return _number_of(job_id) in read_lines(run_dir / CANCELLED)


def forget_cancelled(run_dir: Path, job_id: str) -> None:
    """Removes the record of `record_cancelled` if the scheduler did not cancel the job. Ignores errors."""
    with suppress(DdpHpcError):
        kept = [line for line in read_lines(run_dir / CANCELLED) if line != _number_of(job_id)]
        content = "".join(f"{line}\n" for line in kept).encode()
        write_atomically(run_dir / CANCELLED, content, CANCELLED, is_private=True)


def resume_command(run_dir: Path) -> str:
    """Returns the shell command that resumes the run; empty if the last job of the run has left none."""
    return next(iter(read_lines(run_dir / RESUME)), "")


def _number_of(job_id: str) -> str:
    return re.split("[.@]", job_id)[0]


def submissions(run_dir: Path) -> list[SubmissionRecord]:
    """Returns the recorded submissions, oldest first. Damaged lines are skipped."""
    records = []
    for line in read_lines(run_dir / SUBMITTED):
        try:
            read = json.loads(line)
            known = {own.name: read[own.name] for own in fields(SubmissionRecord)}
            at_s, argv = known.pop("at_s"), known.pop("argv")
            strings = {key: str(value) for key, value in known.items()}
            in_time = isinstance(at_s, int) and 0 <= at_s < _MAX_S
            if in_time and isinstance(argv, list) and is_job_id(strings["job_id"]):
                records.append(SubmissionRecord(**strings, at_s=at_s, argv=tuple(map(str, argv))))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return records


def submission_of(run_dir: Path, job_id: str) -> SubmissionRecord | None:
    """Returns the submission of a job; None if it was not queued by `ddp-hpc submit`."""
    return next((s for s in reversed(submissions(run_dir)) if same_job(s.job_id, job_id)), None)


def attempts(run_dir: Path) -> list[Attempt]:
    """Returns the recorded starts, oldest first. Damaged lines are skipped.

    A job script records only the number of its job. The cluster is taken from the recorded submissions.
    """
    clusters = {
        number: at + cluster
        for number, at, cluster in (s.job_id.partition("@") for s in submissions(run_dir))
    }
    starts, cluster = [], ""
    for start in filter(None, map(parse_attempt, read_lines(run_dir / ATTEMPTS))):
        # A successor is queued on the same cluster as the previous job.
        cluster = clusters.get(start.job_id, cluster)
        starts.append(replace(start, job_id=start.job_id + cluster))
    return starts


def job_ids(run_dir: Path) -> list[str]:
    """Returns the ids of the jobs in the run directory, in the order in which they were first recorded."""
    first_seen = [(s.at_s, s.job_id) for s in submissions(run_dir)]
    first_seen += [(a.at_s, a.job_id) for a in attempts(run_dir)]
    return list(dict.fromkeys(job_id for _, job_id in sorted(first_seen, key=lambda pair: pair[0])))


def next_job(run_dir: Path, job_id: str) -> str:
    """Returns the job that resumes the run after this job; empty if the run directory records none."""
    queued = [s.job_id for s in submissions(run_dir) if s.after and same_job(s.after, job_id)]
    if queued:
        return queued[-1]
    starts = attempts(run_dir)
    own = [index for index, start in enumerate(starts) if same_job(start.job_id, job_id)]
    later = starts[own[-1] + 1 :] if own else []
    # Attempt 1 starts a new run.
    return later[0].job_id if later and later[0].number > 1 and is_job_id(later[0].job_id) else ""


def read_lines(path: Path, max_bytes: int = _MAX_BYTES) -> list[str]:
    """Returns the lines of a file of the run, of a large one only the last ones; none if it is unreadable."""
    try:
        if not is_plain(path):
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - max_bytes))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
