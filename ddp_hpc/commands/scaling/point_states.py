"""The state of a point, from its results, its scheduler and its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.text_table import printable
from ddp_hpc.bench.scaling.points import LOG, Point, Settings
from ddp_hpc.bench.scaling.results import Measured, NotMeasuredError, read_point
from ddp_hpc.queue import submission_ledger as ledger
from ddp_hpc.queue.first_failure import first_failure, last_lines
from ddp_hpc.queue.job_report import JobReport, combine
from ddp_hpc.queue.log_files import read_tail
from ddp_hpc.schedulers.client import read_job
from ddp_hpc.schedulers.job_state import check_job_id


@dataclass(frozen=True)
class State:
    """The state of a point: `word` is done, waiting, running, failed or missing; `text` gives details."""

    word: str
    text: str = ""
    measured: Measured | None = None

    @property
    def is_live(self) -> bool:
        """Returns whether the point is pending or running, so that it must not be started again."""
        return self.word in ("waiting", "running")

    def line(self, point: Point) -> str:
        """Returns a line about the point for the user."""
        if self.measured is not None:
            return f"{point}: {self.measured.samples_per_s:,.1f} samples/s"
        return f"{point}: {self.word}, {self.text}"


def look(
    folder: Path, point: Point, settings: Settings, *, in_use: bool = False, must_answer: bool = False
) -> State:
    """Returns the state of a point. `in_use` means that another process is starting points in the directory.

    Raises:
        DdpHpcError: the scheduler does not respond, and `must_answer` is set.
    """
    own, problem = folder / point.folder, ""
    try:
        if measured := read_point(own, point, settings):
            return State("done", measured=measured)
    except NotMeasuredError as error:
        problem = str(error)
    log = own / LOG
    if log.exists():
        return State("running", "here") if in_use else State("failed", _of_log(log, problem))
    jobs = ledger.job_ids(own)
    if not jobs:
        return State("failed", problem) if problem else State("missing", "not started")
    try:
        return _of_job(_report(jobs[-1], own), problem)
    except DdpHpcError as error:
        if must_answer:
            raise
        return State("waiting", f"job {jobs[-1]}, whose scheduler does not respond: {error}")


def _of_log(log: Path, problem: str) -> str:
    text = read_tail([log])
    failure = first_failure(text)
    lines = failure.lines if failure else last_lines(text)
    said = _key_line(lines, is_named=failure is not None) if lines else "no output"
    return f"{problem or printable(said)}; log: {log}"


def _report(job_id: str, folder: Path) -> JobReport:
    try:
        job = read_job(check_job_id(job_id))
    except RequestError:  # there is no scheduler here, so the directory was copied from elsewhere
        job = None
    return combine(job_id, job, folder)


def _of_job(seen: JobReport, problem: str) -> State:
    text = f"job {seen.job_id}"
    if seen.job is None:
        return State("failed", f"{text} is no longer known to the scheduler; {problem or 'no summary'}")
    if seen.job.phase != "ended":
        reason = f", {seen.job.reason}" if seen.job.phase == "waiting" and seen.job.reason else ""
        return State(seen.job.phase, printable(f"{text}: {seen.job.word}{reason}"))
    if seen.post_mortem is None:
        return State("failed", f"{text} has ended; {problem or 'no summary'}")
    dead = seen.post_mortem
    why = (
        f": {_key_line(dead.lines, is_named=dead.rank is not None or bool(dead.host))}" if dead.lines else ""
    )
    return State("failed", printable(f"{text}: {dead.what}{why}; see ddp-hpc status {seen.job_id}"))


def _key_line(lines: Sequence[str], *, is_named: bool) -> str:
    """Returns the first line of a message with a rank or host, or the last line of a traceback or log."""
    return lines[0] if is_named and "Traceback" not in lines[0] else lines[-1]
