"""The stand-in's controller: its settings, its folder, and which jobs may start."""

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

FOLDER_VARIABLE = "SLURM_STAND_IN_HOME"  # set by the installed commands
OVER = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
HELD = "JobHeldAdmin"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What slurm.conf would say. The nodes are names only: everything runs on this machine."""

    cluster: str = "rehearsal"
    first_job: int = (
        5  # ranks without MPI find each other by the job's id: no two machines here may share one
    )
    nodes: tuple[str, ...] = ("node1", "node2")
    partition: str = "batch"
    walltime_s: int = 0  # in the place of what jobs ask for
    kill_wait_s: float = 30.0
    max_jobs: int = 0  # starts in all, requeues too; further ones are held
    poll_s: float = 0.05
    keeper_pid: int = 0  # jobs are killed when this process is gone


def folder() -> Path:
    """The stand-in's folder."""
    return Path(os.environ[FOLDER_VARIABLE])


def write_settings(root: Path, settings: Settings) -> None:
    """For all commands and daemons of the machine below `root`."""
    (root / "slurm.json").write_text(json.dumps(asdict(settings)))


def read_settings(root: Path) -> Settings:
    """What was written last."""
    values = json.loads((root / "slurm.json").read_text())
    return replace(Settings(), **{**values, "nodes": tuple(values["nodes"])})


def schedule(root: Path) -> None:
    """Starts the jobs whose turn it is, and holds those beyond `max_jobs`. For whoever rehearses."""
    for number in jobs.numbers(root):
        job = jobs.load(root, number)
        waits = [before for before in job["after"] if jobs.load(root, before)["state"] not in OVER]
        if job["state"] != "PENDING" or job["reason"] == HELD or job["runs"] or waits:
            continue
        if may_run(root):
            jobs.save(root, number, {**job, "state": "CONFIGURING", "reason": "None"})
            module = "ddp_hpc.rehearse.slurm.stepd"
            jobs.start_daemon(root, module, number, {FOLDER_VARIABLE: str(root)})
        else:
            jobs.save(root, number, {**job, "reason": HELD})


def may_run(root: Path) -> bool:
    """False where as many jobs were started as the machine may run."""
    max_jobs = read_settings(root).max_jobs
    num_runs = sum(jobs.load(root, number)["runs"] for number in jobs.numbers(root))
    return not max_jobs or num_runs < max_jobs


def job_number(word: str, root: Path, complaint: str) -> int:
    """The number of an existing job.

    Raises:
        RefusedError: there is none; `complaint` is what the command says then.
    """
    if not (word.isascii() and word.isdecimal() and jobs.job_file(root, int(word)).exists()):
        raise RefusedError(complaint)
    return int(word)


def hostlist(nodes: Sequence[str]) -> str:
    """`node[1-2]` of node1 and node2; these names count up."""
    stem = nodes[0].rstrip("0123456789")
    numbers = [node.removeprefix(stem) for node in nodes]
    return nodes[0] if len(nodes) == 1 else f"{stem}[{numbers[0]}-{numbers[-1]}]"


def run_lengths(counts: Sequence[int]) -> str:
    """Slurm's spelling of a number a node: `2(x2),1`."""
    groups = [(value, len(list(group))) for value, group in groupby(counts)]
    return ",".join(f"{value}(x{times})" if times > 1 else str(value) for value, times in groups)


def run(command: Callable[[Sequence[str], Mapping[str, str]], int]) -> NoReturn:
    """A command's frame: its refusals become stderr and exit code."""
    try:
        sys.exit(command(sys.argv[1:], os.environ))
    except RefusedError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
