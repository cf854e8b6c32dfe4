"""A job's log on the screen, once or until the run is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ddp_hpc.errors import DdpHpcError
from ddp_hpc.jobs.job_report import UnknownJobError, View, look
from ddp_hpc.jobs.log_files import Reader, is_plain
from ddp_hpc.schedulers.run_command import plain

# How often a log's file is looked at, and when the scheduler is asked again: soon at first, for a job that is
# over at once, then seldom, as thousands of users ask the same server.
LOOK_S = 1.0
ASK_FIRST_S, ASK_AT_MOST_S = 2.0, 30.0
# A shared file system shows a file of another node late.
LATE_S = 5.0

Write = Callable[[bytes], None]
Say = Callable[[str], None]


def show(job_id: str, run_dir: Path | None, write: Write) -> None:
    """Writes the log as it is now.

    Raises:
        DdpHpcError: there is none, with the reason.
    """
    seen = look(job_id, run_dir)
    paths = [Path(path) for path in seen.logs]
    if not any(map(is_plain, paths)):
        raise DdpHpcError(_why_none(seen))
    for path in paths:
        _copy(Reader(path), write)


def follow(job_id: str, run_dir: Path | None, write: Write, say: Say) -> None:
    """Writes the log until no job goes on with the run any more; `say` is for what happens meanwhile.

    Raises:
        DdpHpcError: the job is not known, or has ended and left no log.
    """
    followed: set[str] = set()
    while job_id and job_id not in followed:
        end = _follow_one(job_id, run_dir, write, say, is_first=not followed)
        followed.add(job_id)
        job_id = end.next_job
        if job_id and job_id not in followed:
            say(f"-- the run goes on as job {job_id}")


def _follow_one(job_id: str, run_dir: Path | None, write: Write, say: Say, *, is_first: bool) -> View:
    readers: dict[Path, Reader] = {}
    told, ask_s = "", ASK_FIRST_S
    seen: View | None = None
    while True:
        try:
            seen = look(job_id, run_dir)
        except UnknownJobError:
            if seen is None:
                raise
            seen = replace(seen, job=None, verdict="unknown")
        except DdpHpcError as error:  # the next answer may be a better one
            if seen is None and is_first:
                raise
            say(f"-- {error}")
            if seen is None:
                time.sleep(ask_s)
                continue
        for path in [Path(path) for path in seen.logs]:
            readers.setdefault(path, Reader(path))
        ended = seen.job is None or seen.job.phase == "ended"
        news = _news(seen)
        if news and news != told:
            say(f"-- {news}")
        told = news
        _look_until(time.monotonic() + (LOOK_S if ended else ask_s), readers, write)
        if ended:
            end_s = time.monotonic() + LATE_S
            while readers and not any(map(is_plain, readers)) and time.monotonic() < end_s:
                _look_until(time.monotonic() + LOOK_S, readers, write)
            if not any(map(is_plain, readers)):
                say(f"-- {_why_none(seen)}")
            say(f"-- job {seen.job_id}: {_end(seen)}")
            return seen
        # A job that starts or ends is of interest at once; one that waits or runs for hours is not.
        ask_s = min(ASK_AT_MOST_S, ask_s * 1.5)


def _look_until(end_s: float, readers: dict[Path, Reader], write: Write) -> None:
    while True:
        for reader in readers.values():
            _copy(reader, write)
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(LOOK_S, left_s))


def _copy(reader: Reader, write: Write) -> None:
    for piece in _pieces(reader):
        write(piece)


def _pieces(reader: Reader) -> Iterator[bytes]:
    new = reader.new()
    while True:
        try:
            piece = next(new, None)
        except OSError as error:
            closed = isinstance(error, PermissionError)
            remedy = "it is the job's owner who can" if closed else "look whether its file system is well"
            raise DdpHpcError(f"{reader.path}: cannot be read ({error.strerror}); {remedy}") from error
        if piece is None:
            return
        yield piece


def _news(seen: View) -> str:
    """What a person who waits for the log should know; empty while it comes."""
    job = seen.job
    if job is None or job.phase == "ended":
        return ""
    if job.phase == "waiting":
        why = f" ({plain(job.reason)})" if job.reason else ""
        return f"job {seen.job_id} has not started{why}" + (f"; {seen.advice}" if seen.advice else "")
    if not job.log_is_live and not any(is_plain(Path(path)) for path in seen.logs):
        return f"job {seen.job_id} runs; PBS brings its log when it ends (-k doe would write it at once)"
    return ""


def _why_none(seen: View) -> str:
    job = seen.job
    where = f" ({', '.join(seen.logs)})" if seen.logs else ""
    if job is None:
        return (
            f"the scheduler no longer knows job {seen.job_id}, so it cannot tell where the log is; look in "
            "the folder that the job was submitted from"
        )
    if job.phase == "waiting":
        return f"{_news(seen)}; there is no log yet{where}; --follow waits for it"
    if job.phase == "running":
        return f"{_news(seen) or f'job {seen.job_id} has written nothing yet'}{where}; --follow waits for it"
    return (
        f"job {seen.job_id} ended ({job.word}) without a log{where}; ddp-hpc status {seen.job_id} tells more"
    )


def _end(seen: View) -> str:
    if seen.job is None and seen.verdict == "unknown":
        return "ended; the scheduler no longer knows it"
    if seen.post_mortem is None:
        return seen.verdict
    return f"{seen.verdict}: {plain(seen.post_mortem.what)}; ddp-hpc status {seen.job_id} tells more"
