"""Combines the states of the tasks of a job array."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.run_outcomes import State
from ddp_hpc.queue.job_report import (
    JobReport,
    check_run_dir,
    report_known,
    verdict_of,
    verdict_without_record,
)
from ddp_hpc.queue.run_directories import find_run_dir
from ddp_hpc.schedulers.client import read_jobs
from ddp_hpc.schedulers.job_state import JobState, check_job_id, task_index

# Each report reads the log and the run directory of a task.
_MAX_REPORTS = 20
# The verdict on an array is the first of these that one of its tasks has.
_FAILED, _STOPPED = State.ending_in("failure"), State.ending_in("stop")
_ORDER = (*_FAILED, "running", "waiting", *_STOPPED, "unknown", "cancelled", *State.ending_in("success"))


@dataclass(frozen=True, kw_only=True)
class ArrayReport:
    """The status of a job array.

    `tasks` are the states of all tasks, and `counts` is the number of tasks for each verdict. `problems` are
    the reports on at most 20 tasks that have ended without success; `num_problems` is the number of all such
    tasks.
    """

    job_id: str
    verdict: str
    name: str
    owner: str
    counts: dict[str, int]
    tasks: tuple[JobState, ...]
    problems: tuple[JobReport, ...]
    num_problems: int

    @property
    def live_tasks(self) -> list[JobState]:
        """The tasks that have not ended."""
        return [task for task in self.tasks if task.phase != "ended"]


def report_job_or_array(
    job_id: str, run_dir: Path | None = None, *, is_file_enough: bool = False
) -> JobReport | ArrayReport:
    """Returns the current status of a job or of a job array.

    With `is_file_enough`, it is based on the files in `run_dir` if the scheduler does not answer.

    Raises:
        UnknownJobError: neither the scheduler nor a run directory knows the job.
        RequestError: the id is invalid, or `run_dir` does not exist.
        DdpHpcError: the scheduler does not answer.
    """
    check_run_dir(run_dir)
    check_job_id(job_id)
    try:
        jobs = read_jobs(job_id)
    except DdpHpcError as error:
        if run_dir is None or not is_file_enough:
            raise
        return replace(report_known(job_id, None, run_dir), no_answer=str(error))
    if jobs and jobs[0].array:
        return _report_array(jobs, run_dir)
    return report_known(job_id, jobs[0] if jobs else None, run_dir)


def run_dir_of_task(task: JobState, run_dir: Path | None) -> Path | None:
    """Returns the run directory of a task; None if it is unknown. `run_dir` is the value of --run-dir."""
    own = run_dir / f"task-{task_index(task.job_id)}" if run_dir is not None else None
    return own if own is not None and own.is_dir() else find_run_dir(task.job_id, task, Path.cwd())


def _report_array(tasks: list[JobState], run_dir: Path | None) -> ArrayReport:
    ended = [task for task in tasks if task.phase == "ended" and task.end != "done"]
    ended.sort(key=lambda task: task.end in ("cancelled", "unknown"))  # the causes of failures come first
    verdicts: dict[str, str] = {}
    problems: list[JobReport] = []
    for task in ended:
        if len(problems) < _MAX_REPORTS:
            report = report_known(task.job_id, task, run_dir_of_task(task, run_dir))
            run_dir = run_dir or _dir_of_array(report)
            verdicts[task.job_id] = report.verdict
            problems += [report] if report.verdict != "done" else []
        elif task.end == "unknown":
            own = run_dir / f"task-{task_index(task.job_id)}" if run_dir else None
            verdicts[task.job_id] = verdict_without_record(task, own)
    counts = Counter[str]()
    for task in tasks:
        counts[verdicts.get(task.job_id) or verdict_of(task, None)] += task.num_tasks
    return ArrayReport(
        job_id=tasks[0].array,
        verdict=next(verdict for verdict in _ORDER if counts[verdict]),
        name=tasks[0].name,
        owner=tasks[0].owner,
        counts={verdict: counts[verdict] for verdict in reversed(_ORDER) if counts[verdict]},
        tasks=tuple(tasks),
        problems=tuple(problems),
        num_problems=sum(verdicts.get(task.job_id) != "done" for task in ended),
    )


def _dir_of_array(task: JobReport) -> Path | None:
    """Returns the directory of the run directories of all tasks, so that the other ones are found at once."""
    own = Path(task.run_dir)
    return own.parent if task.run_dir and own.name == f"task-{task_index(task.job_id)}" else None
