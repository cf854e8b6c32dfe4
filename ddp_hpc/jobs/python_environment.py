"""The Python environment of the ddp-hpc that submits a job, which the job must use, too."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ddp_hpc.request.job import Job


def own_environment(work_dir: Path) -> str:
    """Returns the directory of the virtual or conda environment that contains this ddp-hpc.

    Returns an empty text for a Python that belongs to the system or a module, and for `.venv` in `work_dir`,
    which scripts activate by themselves.
    """
    prefix = Path(sys.prefix)
    is_environment = sys.prefix != sys.base_prefix or (prefix / "conda-meta").is_dir()
    is_default = prefix.resolve() == (work_dir / ".venv").resolve()
    return sys.prefix if is_environment and not is_default and ":" not in sys.prefix else ""


def environment_for_job(work_dir: Path, environ: Mapping[str, str]) -> str:
    """Returns the environment that a job submitted from `work_dir` does not find by itself; empty if none.

    An environment that is not active, such as that of pipx, does not replace a `.venv` that contains ddp-hpc.
    """
    own = own_environment(work_dir)
    return own if _is_active(own, environ) or not (work_dir / ".venv/bin/ddp-hpc").exists() else ""


def with_own_environment(job: Job, work_dir: Path, environ: Mapping[str, str]) -> Job:
    """Returns the job with the environment of this ddp-hpc, unless its options name another one."""
    if job.python_env or job.conda_env or job.standalone:
        return job
    return replace(job, python_env=environment_for_job(work_dir, environ))


def explain(python_env: str, environ: Mapping[str, str], *, is_passed: bool = False) -> str:
    """Returns which python the job runs, if that is not the one of the active environment; else empty.

    `is_passed` means that the script itself does not name the environment, but gets it as a variable.
    """
    if not python_env or _is_active(python_env, environ):
        return ""
    active = environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX")
    instead = f", not in the active environment {active}" if active else ""
    effect = (
        f"the script gets VIRTUAL_ENV={python_env}" if is_passed else f"the job runs {python_env}/bin/python"
    )
    return (
        f"ddp-hpc is installed in {python_env}{instead}, so {effect}; if your program needs another "
        "environment, install ddp-hpc there, and submit the job with it"
    )


def _is_active(python_env: str, environ: Mapping[str, str]) -> bool:
    return python_env in (environ.get("VIRTUAL_ENV"), environ.get("CONDA_PREFIX"))
