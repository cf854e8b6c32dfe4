"""The output of `ddp-hpc status` without JOB: one line for each job."""

from __future__ import annotations

from pathlib import Path

from ddp_hpc.base.text_table import printable
from ddp_hpc.base.units import format_walltime
from ddp_hpc.queue.job_report import JobReport


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
        return "the scheduler no longer knows the job"
    warning = "warning, see --long" if report.warning else ""
    return ", ".join(filter(None, (_step(report), _time(report), warning)))


def _step(report: JobReport) -> str:
    if (progress := report.progress) is not None:
        return f"step {progress.step} of {progress.num_steps}"
    return f"step {report.state.step}" if report.state is not None else ""


def _time(report: JobReport) -> str:
    job = report.job
    if job is None or job.phase != "running" or job.walltime_s is None or job.elapsed_s is None:
        return ""
    return f"{format_walltime(job.elapsed_s)} of {format_walltime(job.walltime_s)}"
