"""What became of a point: done, or what its scheduler or its log has to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.bench.scaling import LOG, Point, Settings
from ddp_hpc.bench.scaling_results import Measured, NotMeasuredError, read_point
from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.queue import ledger
from ddp_hpc.queue.commands import plain
from ddp_hpc.queue.first_failure import first_failure, last_lines
from ddp_hpc.queue.job_state import check_job_id
from ddp_hpc.queue.log_files import read_tail
from ddp_hpc.queue.scheduler import read_job
from ddp_hpc.queue.view import View, view


@dataclass(frozen=True)
class State:
    """`word` is done, waiting, running, failed or missing; `text` what there is to say about it."""

    word: str
    text: str = ""
    measured: Measured | None = None

    @property
    def is_live(self) -> bool:
        """Whether it is somewhere on its way, so that nobody else must start it."""
        return self.word in ("waiting", "running")

    def line(self, point: Point) -> str:
        """For people."""
        if self.measured is not None:
            return f"{point}: {self.measured.samples_per_s:,.1f} samples/s"
        return f"{point}: {self.word}, {self.text}"


def look(
    folder: Path, point: Point, settings: Settings, *, in_use: bool = False, must_answer: bool = False
) -> State:
    """How the point of that folder is. `in_use`: somebody starts points here just now.

    Raises:
        DdpHpcError: with `must_answer`, where its scheduler does not.
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
        return State("failed", problem) if problem else State("missing", "it was not started")
    try:
        return _of_job(_view(jobs[-1], own), problem)
    except DdpHpcError as error:
        if must_answer:
            raise
        return State("waiting", f"job {jobs[-1]}, and its scheduler does not answer: {error}")


def _of_log(log: Path, problem: str) -> str:
    text = read_tail([log])
    failure = first_failure(text)
    lines = failure.lines if failure else last_lines(text)
    said = _telling(lines, is_named=failure is not None) if lines else "it said nothing"
    return f"{problem or plain(said)}; its log: {log}"


def _view(job_id: str, folder: Path) -> View:
    try:
        job = read_job(check_job_id(job_id))
    except RequestError:  # no scheduler here: the folder was copied
        job = None
    return view(job_id, job, folder)


def _of_job(seen: View, problem: str) -> State:
    text = f"job {seen.job_id}"
    if seen.job is None:
        return State("failed", f"{text} is not known here any more; {problem or 'it left no summary'}")
    if seen.job.phase != "ended":
        reason = f", {seen.job.reason}" if seen.job.phase == "waiting" and seen.job.reason else ""
        return State(seen.job.phase, plain(f"{text}: {seen.job.word}{reason}"))
    if seen.post_mortem is None:
        return State("failed", f"{text} has ended; {problem or 'it left no summary'}")
    dead = seen.post_mortem
    why = f": {_telling(dead.lines, is_named=dead.rank is not None or bool(dead.host))}" if dead.lines else ""
    return State("failed", plain(f"{text}: {dead.what}{why}; see ddp-hpc status {seen.job_id}"))


def _telling(lines: Sequence[str], *, is_named: bool) -> str:
    """Of what a rank or a host said the first line; of a traceback, and of a log's end, the last."""
    return lines[0] if is_named and "Traceback" not in lines[0] else lines[-1]
