"""A common interface to the stand-ins for PBS and Slurm: install, submit, schedule, query the status."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.lint.parse_script import Script
from ddp_hpc.rehearse import jobs, machine
from ddp_hpc.rehearse.pbs import resources, server
from ddp_hpc.rehearse.slurm import controller, tables
from ddp_hpc.rehearse.slurm.stepd import log_path
from ddp_hpc.schedulers.registry import SCHEDULERS

_SUBMIT_LIMIT_S = 120


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The status of a job. `exit_code` is the script's exit code; None if the script has not ended."""

    name: str
    is_over: bool
    was_held: bool
    exit_code: int | None
    how: str
    logs: tuple[Path, ...]
    left_over: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The configuration of a stand-in. The value 0 selects its default."""

    nodes: tuple[str, ...]
    walltime_s: int
    max_jobs: int
    keeper_pid: int
    kill_delay_s: float


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The stand-in for one scheduler: its submit command, and functions that start jobs and query them."""

    submit: tuple[str, ...]
    schedule: Callable[[Path], None]
    status: Callable[[Path, int], JobStatus]
    install: Callable[[Path, Path, Path, Setup], None]
    """Writes the settings, the commands and mpiexec into their directories."""
    requested_nodes: Callable[[Script], int]
    walltime_s: Callable[[Script], int]
    launcher: str
    """The scheduler's own launcher; empty if ranks are started by mpiexec."""
    mpiexec: str
    """The kind of mpiexec that is usual with this scheduler."""


def submit(queue: Queue, script: Path, directory: Path, environ: Mapping[str, str]) -> None:
    """Submits a script from a directory, in a login shell that finds the stand-ins, as a user would.

    Raises:
        RequestError: the scheduler refuses the script; the message contains its output.
        DdpHpcError: the scheduler does not answer.
    """
    argv = ["bash", "--login", "-c", 'exec "$@"', "bash", *queue.submit, str(script)]
    try:
        done = subprocess.run(
            argv,
            cwd=directory,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SUBMIT_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise DdpHpcError(
            f"{queue.submit[0]} did not answer within {_SUBMIT_LIMIT_S} s; try again"
        ) from error
    if done.returncode:
        lines = [
            line.strip() for line in done.stderr.encode("ascii", "backslashreplace").decode().splitlines()
        ]
        raise RequestError(f"the script was refused: {'; '.join(filter(None, lines))}; correct the script")


def _pbs_status(root: Path, number: int) -> JobStatus:
    job = jobs.load(root, number)
    name, exit_code, comment = f"{number}.{job['server']}", job.get("Exit_status"), job.get("comment", "")
    was_held = comment == server.NO_MORE_JOBS
    # PBS holds a job whose log cannot be written, and nobody releases it in a rehearsal.
    is_over = job["job_state"] == "F" or (job["job_state"] == "H" and bool(comment) and not was_held)
    how = comment.rpartition(" and ")[2]
    logs = []
    for ending, key in (("OU", "Output_Path"), ("ER", "Error_Path")):
        destination = Path(job[key].partition(":")[2])
        spooled = root / "spool" / f"{name}.{ending}"
        logs.append(destination if "d" in job["Keep_Files"] or not spooled.exists() else spooled)
    return JobStatus(
        name=name,
        is_over=is_over,
        was_held=was_held,
        exit_code=exit_code,
        how=how if exit_code is None else f"Exit_status {exit_code} ({how})",
        logs=tuple(logs if job["Join_Path"] == "n" else logs[:1]),
        left_over=tuple(job.get("left_over", ())),
    )


def _slurm_status(root: Path, number: int) -> JobStatus:
    job = jobs.load(root, number)
    state, is_over = job["state"], job["state"] in controller.OVER
    code, _, number_of_signal = job.get("exit_code", "0:0").partition(":")
    exit_code = int(code) or (128 + int(number_of_signal) if number_of_signal != "0" else 0)
    how = f"{state}, ExitCode {job.get('exit_code', '0:0')}"
    if job["runs"] > 1:
        how += f", started {job['runs']} times"
    patterns = [job["output"], job["error"]] if job["error"] else [job["output"]]
    return JobStatus(
        name=str(number),
        is_over=is_over,
        was_held=state == "PENDING" and job["reason"] == controller.HELD,
        exit_code=(exit_code if state in ("COMPLETED", "FAILED") else exit_code or 1) if is_over else None,
        how=how,
        logs=tuple(log_path(job, pattern) for pattern in patterns),
        left_over=(),  # Slurm ends all processes of a job
    )


def _install_pbs(root: Path, bin_: Path, mpi_bin: Path, setup: Setup) -> None:
    settings = server.Settings(
        server="rehearsal",
        nodes=tuple(f"{name}.rehearsal" for name in setup.nodes),
        any_site=True,
        walltime_s=setup.walltime_s,
        max_jobs=setup.max_jobs,
        keeper_pid=setup.keeper_pid,
        kill_delay_s=setup.kill_delay_s or server.Settings.kill_delay_s,
        obituary_s=0.0,
    )
    server.write_settings(root, settings)
    machine.install_pbs(root, bin_, mpi_bin)


def _install_slurm(root: Path, bin_: Path, _mpi_bin: Path, setup: Setup) -> None:
    settings = controller.Settings(
        first_job=os.getpid(),
        nodes=setup.nodes,
        walltime_s=setup.walltime_s,
        max_jobs=setup.max_jobs,
        keeper_pid=setup.keeper_pid,
        kill_wait_s=setup.kill_delay_s or controller.Settings.kill_wait_s,
    )
    controller.write_settings(root, settings)
    machine.install_slurm(root, bin_)


def _chunks_of_pbs(script: Script) -> int:
    selects = [value for _, name, value in script.resources() if name == "select"]
    groups = selects[-1].split("+") if selects else ["1"]
    counts = [re.match(r"[0-9]{1,7}", group) for group in groups]
    return max(1, sum(int(count[0]) if count else 1 for count in counts))


def _nodes_of_slurm(script: Script) -> int:
    match = re.match(r"[0-9]{1,7}", script.value("--nodes") or "1")
    return max(1, int(match[0])) if match else 1


def _walltime_of_pbs(script: Script) -> int:
    requested = {name: value for _, name, value in script.resources()}
    return resources.walltime_s(requested.get("walltime", "0"))


def _walltime_of_slurm(script: Script) -> int:
    return tables.walltime_s(script.value("--time") or "0")


QUEUES = {
    "pbs": Queue(
        submit=("qsub",),
        schedule=server.schedule,
        status=_pbs_status,
        install=_install_pbs,
        requested_nodes=_chunks_of_pbs,
        walltime_s=_walltime_of_pbs,
        launcher="",
        mpiexec="pals",
    ),
    "slurm": Queue(
        submit=("sbatch",),
        schedule=controller.schedule,
        status=_slurm_status,
        install=_install_slurm,
        requested_nodes=_nodes_of_slurm,
        walltime_s=_walltime_of_slurm,
        launcher="srun",
        mpiexec="hydra",
    ),
}


def find_queue(scheduler: str) -> Queue | None:
    """Returns the stand-in of the scheduler with this name; None if there is none."""
    known = SCHEDULERS.get(scheduler)
    if scheduler in QUEUES or known is None or not known.stand_in:
        return QUEUES.get(scheduler)
    # The module is loaded by name, since the directory of a scheduler can contain its own stand-in.
    queue: Queue = importlib.import_module(known.stand_in).QUEUE
    return queue
