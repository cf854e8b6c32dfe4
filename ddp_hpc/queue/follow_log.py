"""Prints a job's log or that of a rank, once or continuously until the run has ended."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ddp_hpc.base.attempt_end import logs_of_attempt, rank_log
from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.text_table import printable
from ddp_hpc.queue.array_report import ArrayReport, report_job_or_array
from ddp_hpc.queue.job_report import JobReport, UnknownJobError
from ddp_hpc.queue.log_files import Reader, is_plain
from ddp_hpc.schedulers.job_state import one_task, same_job

# The log file is read at this interval.
READ_INTERVAL_S = 1.0
# The scheduler is queried after a short time at first, since some jobs end immediately, then less and less
# often, since thousands of users share the server.
FIRST_QUERY_S, MAX_QUERY_INTERVAL_S = 2.0, 30.0
# On a shared file system, a file that another node has written can appear with a delay.
FILE_DELAY_S = 5.0

Write = Callable[[bytes], None]
Notify = Callable[[str], None]


class Source(NamedTuple):
    """Which logs of a job are printed: its own, or those of `rank`, in all attempts of the job or in one."""

    run_dir: Path | None = None
    rank: int | None = None
    attempt: int | None = None

    def report(self, job_id: str, *, is_file_enough: bool = False) -> JobReport:
        """Returns the report on the job, with the logs that are printed."""
        report = _not_array(report_job_or_array(job_id, self.run_dir, is_file_enough=is_file_enough))
        if self.rank is None or not report.run_dir:
            return report
        attempts = _own_attempts(report) if self.attempt is None else [self.attempt]
        names = [rank_log(attempt, "*", self.rank) for attempt in attempts]
        paths = [path for name in names for path in sorted(Path(report.run_dir).glob(name))]
        return replace(report, logs=tuple(map(str, paths)))


def show(job_id: str, source: Source, write: Write, notify: Notify) -> None:
    """Writes the current content of the log. The paths of the logs of ranks go to `notify`.

    Raises:
        RequestError: the job is an array.
        DdpHpcError: there is no log; the message gives the reason.
    """
    report = source.report(job_id, is_file_enough=True)
    if report.no_answer:
        notify(f"-- the state of job {report.job_id} is not known: {report.no_answer}")
    paths = [Path(path) for path in report.logs]
    if not any(map(is_plain, paths)):
        raise DdpHpcError(_why_no_log(report, source))
    for path in paths:
        if source.rank is not None:
            notify(f"-- {path}")
        for chunk in Reader(path).new():
            write(chunk)
    _notify_of_ranks(report, source, notify)


def follow(job_id: str, source: Source, write: Write, notify: Notify) -> None:
    """Writes the logs of the job and its successors until the run has ended. Status lines go to `notify`.

    Raises:
        RequestError: the job is an array.
        DdpHpcError: the job is unknown, or has ended without a log.
    """
    followed: set[str] = set()
    while job_id and job_id not in followed:
        end = _follow_one(job_id, source, write, notify, is_first=not followed)
        followed.add(job_id)
        job_id = end.next_job
        if job_id and job_id not in followed:
            notify(f"-- job {job_id} resumes the run")


def _follow_one(job_id: str, source: Source, write: Write, notify: Notify, *, is_first: bool) -> JobReport:
    readers: dict[Path, Reader] = {}
    last_news, interval_s = "", FIRST_QUERY_S
    report: JobReport | None = None
    while True:
        try:
            report = source.report(job_id)
        except UnknownJobError:
            if report is None:
                raise
            report = replace(report, job=None, verdict="unknown")
        except DdpHpcError as error:  # temporary; the next query can succeed
            if report is None and is_first:
                raise
            notify(f"-- {error}")
            if report is None:
                time.sleep(interval_s)
                continue
        for path in (path for path in map(Path, report.logs) if path not in readers):
            readers[path] = Reader(path)
            if source.rank is not None:
                notify(f"-- {path}")
        ended = report.job is None or report.job.phase == "ended"
        news = _news(report)
        if news and news != last_news:
            notify(f"-- {news}")
        last_news = news
        _copy_until(time.monotonic() + (READ_INTERVAL_S if ended else interval_s), readers, write)
        if ended:
            end_s = time.monotonic() + FILE_DELAY_S
            while readers and not any(map(is_plain, readers)) and time.monotonic() < end_s:
                _copy_until(time.monotonic() + READ_INTERVAL_S, readers, write)
            if not any(map(is_plain, readers)):
                notify(f"-- {_why_no_log(report, source)}")
            _notify_of_ranks(report, source, notify)
            notify(f"-- job {report.job_id}: {_end(report)}")
            return report
        interval_s = min(MAX_QUERY_INTERVAL_S, interval_s * 1.5)


def _own_attempts(report: JobReport) -> list[int]:
    return [start.number for start in report.attempts if same_job(start.job_id, report.job_id)]


def _notify_of_ranks(report: JobReport, source: Source, notify: Notify) -> None:
    """Says where the logs of the ranks are, if they have logs of their own and none of them was printed."""
    directories = [Path(report.run_dir) / logs_of_attempt(number) for number in _own_attempts(report)]
    if source.rank is None and any(directory.is_dir() for directory in directories):
        command = f"ddp-hpc logs {shlex.quote(report.job_id)} --rank R"
        notify(f"-- the output of each rank is in {directories[-1]}; to print it: {command}")


def _not_array(report: JobReport | ArrayReport) -> JobReport:
    if isinstance(report, JobReport):
        return report
    running = [task for task in report.tasks if task.phase == "running"] or report.tasks
    raise RequestError(
        f"job {report.job_id} is a job array, and each of its tasks has its own log; give the ID of a task: "
        f"ddp-hpc logs {shlex.quote(one_task(running[0].job_id))}"
    )


def _copy_until(end_s: float, readers: dict[Path, Reader], write: Write) -> None:
    while True:
        for reader in readers.values():
            for chunk in reader.new():
                write(chunk)
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(READ_INTERVAL_S, left_s))


def _news(report: JobReport) -> str:
    """Returns why the job does not write a log now; empty if it does."""
    job = report.job
    if job is None or job.phase == "ended":
        return ""
    if job.phase == "waiting":
        why = f" ({printable(job.reason)})" if job.reason else ""
        return f"job {report.job_id} has not started{why}" + (f"; {report.advice}" if report.advice else "")
    if not job.log_is_live and not any(is_plain(Path(path)) for path in report.logs):
        return (
            f"job {report.job_id} is running; PBS writes the log only when the job ends (while it runs, with "
            "-k doe)"
        )
    return ""


def _why_no_log(report: JobReport, source: Source) -> str:
    job = report.job
    if source.rank is not None and (job is None or job.phase != "waiting"):
        return (
            f"rank {source.rank} of job {report.job_id} has no log of its own"
            f"{f' in attempt {source.attempt}' if source.attempt else ''} in {report.run_dir}/logs; without "
            "--rank-logs, the output of all ranks is in the log of the job: "
            f"ddp-hpc logs {shlex.quote(report.job_id)}"
        )
    where = f" ({', '.join(report.logs)})" if report.logs else ""
    if job is None:
        why = report.no_answer or f"the scheduler no longer knows job {report.job_id} or the path of its log"
        return f"{why}; look for the log in the directory from which the job was submitted"
    if job.phase == "waiting":
        return f"{_news(report)}; there is no log yet{where}; --follow waits for it"
    if job.phase == "running":
        return f"{_news(report) or f'job {report.job_id} has no output yet'}{where}; --follow waits for it"
    return f"job {report.job_id} ended ({job.word}) without a log{where}; {_more(report)}"


def _end(report: JobReport) -> str:
    if report.job is None and report.verdict == "unknown":
        return "ended; the scheduler no longer knows it"
    if report.post_mortem is None:
        return report.verdict
    return f"{report.verdict}: {printable(report.post_mortem.what)}; {_more(report)}"


def _more(report: JobReport) -> str:
    return f"for details: ddp-hpc status {shlex.quote(report.job_id)}"
