"""Detects scripts without directives that users start in an interactive job, and rehearses such a job."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ddp_hpc.lint.parse_script import Script
from ddp_hpc.rehearse.stand_in_scheduler import find_stand_in
from ddp_hpc.schedulers.registry import SCHEDULERS, is_same_scheduler
from ddp_hpc.sites.site import Site

NUM_NODES = 2
_WITH_DEFAULT = re.compile(r"\$\{(\w+):?[-+=]")


def scheduler_of(script: Script, site: Site | None, mpiexec: str) -> str:
    """Returns the scheduler in whose interactive job the script runs; empty if it needs no job.

    `mpiexec` is the kind of mpiexec for which the script was written.
    """
    body = "\n".join(line for line in script.lines if not line.lstrip().startswith("#"))
    # A script that gives a default for a variable also runs without a job.
    optional = set(_WITH_DEFAULT.findall(body))
    launchers = {command.name for command in script.launches()}
    for name, scheduler in SCHEDULERS.items():
        stand_in = find_stand_in(name)
        if stand_in is None or not stand_in.interactive:
            continue
        prefix = scheduler.inside_job.job_id_variable.partition("_")[0]
        used = set(re.findall(rf"\$\{{?({prefix}_\w+)", body)) - optional
        needs_hosts = bool(launchers) and mpiexec == stand_in.mpiexec_in_jobs
        is_site = site is not None and is_same_scheduler(site, name)
        if used or stand_in.launcher in launchers or needs_hosts or is_site:
            return name
    return ""


def script_of_shell(scheduler: str, num_nodes: int, script: Path, work: Path, log: Path) -> str:
    """Returns a job script that runs `script` in the directory `work`, as if typed in an interactive job."""
    stand_in = find_stand_in(scheduler)
    assert stand_in is not None
    head = stand_in.interactive.format(nodes=num_nodes, log=shlex.quote(str(log)))
    return f"#!/bin/bash\n{head}cd {shlex.quote(str(work))} && exec bash {shlex.quote(str(script))}\n"
