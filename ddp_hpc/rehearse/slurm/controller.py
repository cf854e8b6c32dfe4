"""The controller of the stand-in: its settings, its directory, and the order in which jobs start."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import NoReturn

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError

DIRECTORY_VARIABLE = "SLURM_STAND_IN_HOME"  # set by the installed commands
OVER = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
HELD = "JobHeldAdmin"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that slurm.conf has. The nodes are only names: everything runs on this machine."""

    cluster: str = "rehearsal"
    # Ranks without MPI find each other by their job id, so simultaneous rehearsals need different ids.
    first_job: int = 5
    nodes: tuple[str, ...] = ("node1", "node2")
    partition: str = "batch"
    walltime_s: int = 0  # replaces the walltime of all jobs
    kill_wait_s: float = 30.0
    max_jobs: int = 0  # maximum number of starts, requeues included; further jobs are held
    poll_s: float = 0.05
    keeper_pid: int = 0  # jobs are killed when this process has ended


def directory() -> Path:
    """Returns the directory of the stand-in."""
    return Path(os.environ[DIRECTORY_VARIABLE])


def write_settings(root: Path, settings: Settings) -> None:
    """Writes the settings for all commands and daemons of the machine in `root`."""
    (root / "slurm.json").write_text(json.dumps(asdict(settings)))


def read_settings(root: Path) -> Settings:
    """Returns the current settings."""
    values = json.loads((root / "slurm.json").read_text())
    return replace(Settings(), **{**values, "nodes": tuple(values["nodes"])})


def schedule(root: Path) -> None:
    """Starts jobs that can run, and holds the jobs beyond `max_jobs`."""
    for number in jobs.numbers(root):
        job = jobs.load(root, number)
        waits = [before for before in job["after"] if jobs.load(root, before)["state"] not in OVER]
        if job["state"] != "PENDING" or job["reason"] == HELD or job["runs"] or waits:
            continue
        if may_run(root):
            jobs.save(root, number, {**job, "state": "CONFIGURING", "reason": "None"})
            module = "ddp_hpc.rehearse.slurm.stepd"
            jobs.start_daemon(root, module, number, {DIRECTORY_VARIABLE: str(root)})
        else:
            jobs.save(root, number, {**job, "reason": HELD})


def may_run(root: Path) -> bool:
    """Returns whether fewer than `max_jobs` jobs have been started."""
    max_jobs = read_settings(root).max_jobs
    num_runs = sum(jobs.load(root, number)["runs"] for number in jobs.numbers(root))
    return not max_jobs or num_runs < max_jobs


def job_number(word: str, root: Path, message: str) -> int:
    """Returns the number of an existing job.

    Raises:
        RefusedError: the job does not exist; with `message`.
    """
    if not (word.isascii() and word.isdecimal() and jobs.job_file(root, int(word)).exists()):
        raise RefusedError(message)
    return int(word)


def hostlist(nodes: Sequence[str]) -> str:
    """Returns the nodes in Slurm's notation, such as `node[1-2]`. Their numbers must be consecutive."""
    stem = nodes[0].rstrip("0123456789")
    numbers = [node.removeprefix(stem) for node in nodes]
    return nodes[0] if len(nodes) == 1 else f"{stem}[{numbers[0]}-{numbers[-1]}]"


def run_lengths(counts: Sequence[int]) -> str:
    """Returns the counts per node in Slurm's notation, such as `2(x2),1`."""
    groups = [(value, len(list(group))) for value, group in groupby(counts)]
    return ",".join(f"{value}(x{times})" if times > 1 else str(value) for value, times in groups)


def run(command: Callable[[Sequence[str], Mapping[str, str]], int]) -> NoReturn:
    """Runs a command. Errors are printed to stderr and determine the exit code."""
    try:
        sys.exit(command(sys.argv[1:], os.environ))
    except RefusedError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
