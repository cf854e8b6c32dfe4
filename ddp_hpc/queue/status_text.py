"""The text output of `ddp-hpc status`: one line for each job, or all lines about one job or array."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from ddp_hpc.base.run_outcomes import State
from ddp_hpc.base.text_table import printable
from ddp_hpc.base.units import format_walltime
from ddp_hpc.queue.array_report import ArrayReport
from ddp_hpc.queue.cost_text import cost_line
from ddp_hpc.queue.job_report import JobReport
from ddp_hpc.queue.post_mortem import PostMortem, advice_while_waiting
from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.schedulers.job_state import same_job

_MAX_ATTEMPTS = 5
_LINES_PER_TASK = 2
_UNKNOWN = "the scheduler no longer knows it"
_WITH_LINES = (*State.ending_in("failure"), "unknown")


def line_of(report: JobReport, here: Path) -> str:
    """Returns the job ID, the verdict, the run directory (relative to `here` if possible), and the step and
    time of the job, the reason why it waits, or the cause of its end.
    """
    run = Path(report.run_dir)
    shown = run.relative_to(here) if run.is_relative_to(here) else run
    # Each line is printed as soon as it is known, so the widths cannot depend on all lines.
    columns = f"{report.job_id:<12} {report.verdict:<9} {shown!s:<20} {_fact(report)}"
    return printable(columns.rstrip())


def _fact(report: JobReport) -> str:
    job, ended = report.job, report.post_mortem
    if ended is not None:
        cause = "" if ended.cause == report.verdict else f"{ended.cause}: "
        next_job = f"; job {report.next_job} resumes the run" if report.next_job else ""
        return f"{cause}{ended.what}{next_job}"
    if job is not None and job.phase == "waiting":
        return report.advice or job.reason
    if job is None and report.verdict == "unknown":
        return report.no_answer or "the scheduler no longer knows the job"
    facts = []
    if report.progress is not None:
        facts.append(f"step {report.progress.step} of {report.progress.num_steps}")
    elif report.state is not None:
        facts.append(f"step {report.state.step}")
    if job is not None and job.phase == "running":
        facts.append(_time(report))
    if report.warning:
        facts.append("warning, see --long")
    return ", ".join(filter(None, facts))


def lines_of(report: JobReport) -> Iterator[str]:
    """Yields the lines of the report, each with a label and a value. Unknown values are omitted."""
    for label, text in _facts(report):
        if text:
            yield f"{label:<10}{printable(text)}"
    if report.post_mortem is not None:
        yield from _ended(report.post_mortem)
    if report.resume:
        yield f"{'resume':<10}{printable(report.resume)}"


def lines_of_array(array: ArrayReport) -> Iterator[str]:
    """Yields the lines of the report on a job array: the number of tasks by state, and the failed tasks."""
    named = f" ({array.name} of {array.owner})" if array.name else ""
    counts = ", ".join(f"{number} {verdict}" for verdict, number in array.counts.items())
    yield f"{'job':<10}{printable(f'{array.job_id}{named}: {array.verdict}')}"
    yield f"{'tasks':<10}{counts}"
    if waiting := next((task for task in array.tasks if task.phase == "waiting" and task.reason), None):
        yield f"{'reason':<10}{printable(waiting.reason)}"
        if advice := advice_while_waiting(waiting):
            yield f"{'action':<10}{printable(advice)}"
    for task in array.problems:
        if ended := task.post_mortem:
            yield f"{'task':<10}{printable(f'{task.job_id}: {task.verdict}; {ended.cause}: {ended.what}')}"
            lines = ended.lines[-_LINES_PER_TASK:] if task.verdict in _WITH_LINES else ()
            yield from (f"  | {printable(line)}" for line in lines)
        if task.next_job:
            yield f"{'next':<10}job {task.next_job} resumes the run of {task.job_id}"
    if num_omitted := array.num_problems - len(array.problems):
        yield f"{'':<10}and {num_omitted} more"
    if array.problems:
        yield f"{'details':<10}ddp-hpc status {shlex.quote(array.problems[0].job_id)}"


def _facts(report: JobReport) -> Iterator[tuple[str, str]]:
    job = report.job
    if job is None:
        source = "known only from the files of the run" if report.no_answer else _UNKNOWN
        yield "job", f"{report.job_id}: {report.verdict}; {source}"
        yield "scheduler", report.no_answer
        yield "action", report.advice
    else:
        named = f" ({job.name} of {job.owner})" if job.name else ""
        on = f" on {job.nodes}" if job.nodes else ""
        yield "job", f"{report.job_id}{named}: {report.verdict}, {job.word}{on}"
        if job.phase == "waiting":
            yield "reason", job.reason
            yield "starts", _start(job.starts_at_s)
            yield "action", report.advice
        yield "time", _time(report)
    if sent := report.submission:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(sent.at_s))
        yield "submitted", f"{when} by {sent.user} on {sent.host}"
    yield "step", _step(report)
    yield "eta", _eta(report)
    yield "state", _state(report)
    yield "warning", report.warning
    yield "attempts", _attempts(report)
    yield "cost", cost_line(report.cost) if report.cost is not None else ""
    yield "restart", _not_restarted(report)
    for failed in report.failed_nodes:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(failed.at_s))
        yield "left out", f"node {failed.node}, since {when}: {failed.reason}"
    if report.failed_nodes:
        yield "", "to use these nodes again: ddp-hpc submit --forget-nodes"
    yield "next", f"job {report.next_job}" if report.next_job else ""
    yield "log", ", ".join(report.logs)
    yield "run", report.run_dir


def _start(at_s: float | None) -> str:
    if at_s is None:
        return ""
    in_s = max(0, int(at_s - time.time()))
    return f"about {time.strftime('%Y-%m-%d %H:%M', time.localtime(at_s))}, in {format_walltime(in_s)}"


def _time(report: JobReport) -> str:
    job = report.job
    if job is None or job.walltime_s is None:
        return ""
    if job.elapsed_s is None or job.phase == "waiting":
        return f"{format_walltime(job.walltime_s)} requested"
    return f"{format_walltime(job.elapsed_s)} of {format_walltime(job.walltime_s)}"


def _step(report: JobReport) -> str:
    progress = report.progress
    if progress is None:
        return ""
    loss = f", loss {progress.loss:.6g}" if progress.loss is not None else ""
    return f"{progress.step} of {progress.num_steps}{loss}"


def _eta(report: JobReport) -> str:
    """Returns the estimated remaining time of the training, compared with the remaining walltime."""
    job, progress = report.job, report.progress
    if job is None or job.phase != "running" or progress is None or progress.left_s is None:
        return ""
    left_s = max(0, progress.left_s - int(report.log_age_s))
    text = f"{format_walltime(left_s)} left"
    if job.walltime_s is None or job.elapsed_s is None:
        return text
    spare_s = job.walltime_s - job.elapsed_s - left_s
    if spare_s >= 0:
        return f"{text}, {format_walltime(spare_s)} before the walltime ends"
    then = "another job can resume it" if report.run_dir else "this job will not complete it"
    return f"{text}, {format_walltime(-spare_s)} beyond the end of the walltime; {then}"


def _attempts(report: JobReport) -> str:
    # The number of a run that the user has submitted again begins at 1.
    listed = [
        f"{'submitted again: ' * (start.number == 1 and index > 0)}"
        f"{start.number} (job {start.job_id}{_from(start)})"
        for index, start in enumerate(report.attempts)
    ]
    last = ", ".join(listed[-_MAX_ATTEMPTS:])
    return f"... {last}" if len(listed) > _MAX_ATTEMPTS else last


def _from(start: Attempt) -> str:
    # In a later attempt, 0 stands for a step that the program does not record.
    return f" from step {start.first_step}" if start.first_step or start.number == 1 else ""


def _not_restarted(report: JobReport) -> str:
    """Returns why the last job of the run did not start its ranks again."""
    cost = report.cost
    is_last = (
        cost is not None and bool(cost.not_restarted) and same_job(cost.attempts[-1].job_id, report.job_id)
    )
    return f"none: {cost.not_restarted}" if cost is not None and is_last else ""


def _state(report: JobReport) -> str:
    state = report.state
    if state is None:
        return ""
    # The step of a program that does not record its step is not known.
    step = f" {state.step}" if state.step or not state.state.is_final else ""
    return f"{state.state}{step} {state.reason}"


def _ended(ended: PostMortem) -> Iterator[str]:
    yield f"{'cause':<10}{ended.cause}: {printable(ended.what)}"
    if ended.rank is not None or ended.host:
        who = f"rank {ended.rank}" if ended.rank is not None else "a rank"
        where = f" on {printable(ended.host)}" if ended.host else ""
        yield f"{'failed':<10}{who}{where}"
    for line in ended.lines:
        yield f"  | {printable(line)}"
    yield f"{'action':<10}{printable(ended.remedy)}"
