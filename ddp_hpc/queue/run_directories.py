"""Finds the run directory of a job, and the runs below a directory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ddp_hpc.base.attempt_end import ATTEMPTS
from ddp_hpc.lint.parse_script import MAX_CHARS, parse_script
from ddp_hpc.queue.log_files import is_plain
from ddp_hpc.queue.submission_ledger import SUBMITTED, attempts, job_ids, submissions
from ddp_hpc.schedulers.job_state import JobState, same_job, task_index

_RUN_DIR = "DDP_HPC_RUN_DIR"


def find_run_dir(job_id: str, job: JobState | None, here: Path) -> Path | None:
    """Returns the run directory of a job; None if it is unknown. `job` is its state in the scheduler."""
    for run_dir in _candidates(job, here):
        if any(same_job(known, job_id) for known in job_ids(run_dir)):
            return run_dir
    if job is None or not job.script or not job.work_dir:
        return None
    # A job that has not started and was not queued by `ddp-hpc submit` has no record, so read its script.
    script = Path(job.script)
    if not is_plain(script):
        return None
    try:
        with script.open("rb") as file:
            text = file.read(MAX_CHARS).decode("utf-8", "surrogateescape")
        named = run_dir_in(text, Path(job.work_dir))
        index = task_index(job_id)
        own = named / f"task-{index}" if named is not None and index is not None else named
        return next((path for path in (own, named) if path is not None and path.is_dir()), None)
    except OSError:
        return None


def runs_in(directory: Path) -> list[Path]:
    """Returns the run directories in `directory`/runs, and `directory` itself if it is a run directory; the
    newest is last.

    Each task of a job array has a run directory of its own in the directory of the array.
    """
    try:
        places = [directory, *sorted((directory / "runs").glob("*"))]
        return sorted((run_dir for place in places for run_dir in _runs(place)), key=_last_s)
    except OSError:
        return []


def _runs(run_dir: Path) -> list[Path]:
    tasks = [task for task in sorted(run_dir.glob("task-*")) if _is_run(task)]
    # `submit` records the array itself in the directory of the array, in which no job runs.
    is_own = _is_run(run_dir) and (not tasks or is_plain(run_dir / ATTEMPTS))
    return [*tasks, run_dir] if is_own else tasks


def _candidates(job: JobState | None, here: Path) -> Iterator[Path]:
    if job is not None and job.script:
        yield Path(job.script).parent  # the run directory has a copy of the script, which successors run
    if job is not None and job.work_dir:
        yield from reversed(runs_in(Path(job.work_dir)))
    else:  # less reliable: a run in this directory can have a job with the same ID on another machine
        yield from reversed(runs_in(here))


def run_dir_in(text: str, work_dir: Path) -> Path | None:
    """Returns the value of DDP_HPC_RUN_DIR in a script; None if the script sets no absolute path."""
    assigned = parse_script(text).last_assigned(_RUN_DIR)
    if assigned is None:
        return None
    value = re.sub(r"^\$(?:PWD|\{PWD\})(?=/|$)", lambda _: str(work_dir), assigned)
    return Path(value) if value.startswith("/") and not re.search(r"[$`\0]", value) else None


def _is_run(run_dir: Path) -> bool:
    return any(is_plain(run_dir / name) for name in (SUBMITTED, ATTEMPTS))


def _last_s(run_dir: Path) -> int:
    times = [*(s.at_s for s in submissions(run_dir)), *(start.at_s for start in attempts(run_dir))]
    return max(times, default=0)
