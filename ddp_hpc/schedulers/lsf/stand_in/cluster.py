"""The cluster of the stand-in: its settings, its directory, and the order in which jobs start."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError

DIRECTORY_VARIABLE = "LSF_STAND_IN_HOME"  # set by the installed commands
OVER = ("DONE", "EXIT")
HELD = "The stand-in runs no more jobs"
DEPENDENCY = "Job dependency condition not satisfied"
# Commands of LSF exit with 255 if they refuse a request.
REFUSED = 255


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the cluster. The nodes are only names: everything runs on this machine."""

    cluster: str = "rehearsal"
    first_job: int = 101
    nodes: tuple[str, ...] = ("node1", "node2")
    launch_node: str = "batch1"
    queue: str = "normal"
    walltime_s: int = 0  # replaces the run limits that jobs request
    # Ten minutes on a real cluster (bsub -W), too long for a rehearsal.
    grace_s: float = 10.0
    terminate_interval_s: float = 10.0  # JOB_TERMINATE_INTERVAL of lsb.params
    is_sequential: bool = False  # LSB_USE_SEQUENTIAL_SIGNAL of lsf.conf
    max_jobs: int = 0  # starts in total; further jobs stay pending
    poll_s: float = 0.05
    keeper_pid: int = 0  # jobs are killed when this process is gone


def directory() -> Path:
    """Return the stand-in's directory."""
    return Path(os.environ[DIRECTORY_VARIABLE])


def write_settings(root: Path, settings: Settings) -> None:
    """Write the settings for all commands and daemons of the machine below `root`."""
    (root / "lsf.json").write_text(json.dumps(asdict(settings)))


def read_settings(root: Path) -> Settings:
    """Return the settings of the machine below `root`."""
    values = json.loads((root / "lsf.json").read_text())
    return replace(Settings(), **{**values, "nodes": tuple(values["nodes"])})


def schedule(root: Path) -> None:
    """Start the jobs whose dependencies are satisfied; jobs beyond `max_jobs` stay pending."""
    max_jobs = read_settings(root).max_jobs
    for number in jobs.numbers(root):
        job = jobs.load(root, number)
        if job["stat"] != "PEND" or job["is_started"] or job["pend_reason"] == HELD:
            continue
        before = job["after"] and jobs.load(root, job["after"])
        if before and not _is_satisfied(job["condition"], before["stat"]):
            continue
        started = sum(jobs.load(root, one)["is_started"] for one in jobs.numbers(root))
        if max_jobs and started >= max_jobs:
            jobs.change(root, number, pend_reason=HELD)
            continue
        jobs.change(root, number, is_started=True, pend_reason="")
        module = "ddp_hpc.schedulers.lsf.stand_in.sbatchd"
        jobs.start_daemon(root, module, number, {DIRECTORY_VARIABLE: str(root)})


def _is_satisfied(condition: str, stat: str) -> bool:
    return stat in {"ended": OVER, "done": ("DONE",), "exit": ("EXIT",)}[condition]


def job_number(word: str, root: Path, message: str) -> int:
    """Return the number of an existing job.

    Raises:
        RefusedError: there is no such job; `message` is what the command prints.
    """
    if not (word.isascii() and word.isdecimal() and jobs.job_file(root, int(word)).exists()):
        raise RefusedError(message, REFUSED)
    return int(word)


def run(command: Callable[[Sequence[str], Mapping[str, str]], int]) -> NoReturn:
    """Run a command and exit; refusals go to stderr."""
    try:
        sys.exit(command(sys.argv[1:], os.environ))
    except RefusedError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
