"""The Python environment of the ddp-hpc that submits a job, which the job must use, too."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ddp_hpc.request.job import Job


def environment_for_job(work_dir: Path, environ: Mapping[str, str]) -> str:
    """Returns the environment of this ddp-hpc, if a job submitted from `work_dir` does not find it by itself.

    Scripts use an active environment, or else `.venv`. An environment that is not active, such as that of
    pipx, does not replace a `.venv` that contains ddp-hpc. Returns an empty text if the job finds ddp-hpc,
    and for a Python that belongs to the system or a module.
    """
    own, default = sys.prefix, work_dir / ".venv"
    is_environment = own != sys.base_prefix or (Path(own) / "conda-meta").is_dir()
    if not is_environment or ":" in own:  # a colon separates the entries of PATH
        return ""
    is_default = Path(own).resolve() == default.resolve()
    active = _active(environ)
    uses_default = not active or Path(active).resolve() == default.resolve()
    finds_ddp_hpc = uses_default and (is_default or (default / "bin" / "ddp-hpc").exists())
    return "" if finds_ddp_hpc else own


def with_own_environment(job: Job, work_dir: Path, environ: Mapping[str, str]) -> Job:
    """Returns the job with the environment of this ddp-hpc, unless its options name another one."""
    if job.python_env or job.conda_env:
        return job
    return replace(job, python_env=environment_for_job(work_dir, environ))


def explain(python_env: str, environ: Mapping[str, str]) -> str:
    """Returns which python the job runs, if that is not the one of the active environment; else empty."""
    active = _active(environ)
    if python_env in ("", active):
        return ""
    instead = f", not in the active environment {active}" if active else ""
    return (
        f"ddp-hpc is installed in {python_env}{instead}, so the job runs {python_env}/bin/python; if your "
        "program needs another environment, install ddp-hpc there, and submit the job from it"
    )


def _active(environ: Mapping[str, str]) -> str:
    return environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX") or ""
