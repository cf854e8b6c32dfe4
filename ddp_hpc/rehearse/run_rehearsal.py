"""Runs one rehearsal: submits the script, copies the logs of its jobs to stdout, and cleans up."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ddp_hpc.base import process_control
from ddp_hpc.base.assets import asset_directory
from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.pip_extras import install_command
from ddp_hpc.base.units import format_bytes
from ddp_hpc.rehearse import install_stand_ins, jobs
from ddp_hpc.rehearse.launchers.failure import DOWN, FAILED
from ddp_hpc.rehearse.launchers.fit_to_machine import STEP_SCRIPT, Limits
from ddp_hpc.rehearse.launchers.start_ranks import HYDRA
from ddp_hpc.rehearse.plan_rehearsal import Options, Plan
from ddp_hpc.rehearse.stand_in_scheduler import JobStatus, StandInScheduler, find_stand_in, submit

DEFAULT_STEPS = 3
_POLL_S = 0.1
_STOP_S = 10.0
_MAX_LOG_BYTES = 64 * 1024**2
# If the rehearsal itself runs in a job, the variables of that job must not reach the rehearsed job.
_OTHER_JOB = re.compile(
    r"SLURM|SRUN_|SBATCH_|PBS_|PMI|PALS_|OMPI_|PRTE_|HYD|MPI_LOCAL|TORCHELASTIC_|DDP_HPC_|MASTER_|BASH_FUNC_"
    r"|(?:\w+_)?RANK$|(?:LOCAL_|GROUP_)?WORLD_SIZE$|BASH_ENV$|ENV$"
)

# Scripts of `ddp-hpc render` contain this line.
_RUN_DIR = re.compile(r"^export DDP_HPC_RUN_DIR=.*$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """The final status of each job of the rehearsal."""

    jobs: tuple[JobStatus, ...]
    timed_out: bool
    has_failed: bool
    """Whether a rank or a node has failed (--fail)."""


@dataclass
class _Follower:
    """Copies new content of log files to stdout."""

    files: dict[tuple[str, int], IO[bytes]] = field(default_factory=dict)
    num_bytes: int = 0

    def follow(self, job: str, paths: tuple[Path, ...]) -> None:
        """Copies new output of a job. PBS creates some logs only at the end of the job."""
        for index, path in enumerate(paths):
            with suppress(OSError):
                if (job, index) not in self.files:
                    self.files[job, index] = path.open("rb")
        for file in self.files.values():
            if os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)  # a requeued Slurm job can truncate its log
            # The size is limited because a job can write faster than this loop reads.
            chunk = file.read(_MAX_LOG_BYTES)
            sys.stdout.buffer.write(chunk)
            self.num_bytes += len(chunk)
        sys.stdout.flush()
        if self.num_bytes > _MAX_LOG_BYTES:
            raise DdpHpcError(
                f"the jobs wrote more than {format_bytes(_MAX_LOG_BYTES)} to their logs and were killed; "
                "reduce their output"
            )


def rehearse(plan: Plan, options: Options, say: Callable[[str], None]) -> Result:
    """Runs all jobs of the script until they have ended. `say` prints a line.

    Raises:
        RequestError: the script is refused, or no MPI is installed to start ranks.
        DdpHpcError: the rehearsal itself failed.
        KeyboardInterrupt: after Ctrl-C or SIGTERM; all processes and files have been removed.
    """
    if not sys.platform.startswith("linux"):
        raise RequestError(
            "jobs can be rehearsed only on Linux, because /proc is used to find their processes; use a Linux "
            "machine"
        )
    if not HYDRA.exists():
        raise RequestError(
            f"{HYDRA} is required to start ranks, but does not exist; {install_command('mpich')}"
        )
    run_dir = _kept_directory(plan, options.keep)
    root = Path(tempfile.mkdtemp(prefix="rehearse-"))
    try:
        with _ended_by_signals(), _keeper() as keeper_pid:
            _install(root, plan, options, keeper_pid)
            work = Path.cwd() if options.here else root / "work"
            script = _write_script(root, plan, run_dir or root / "run")
            if _RUN_DIR.search(plan.text):
                then = "kept (--keep)" if run_dir else "removed at the end"
                say(f"the run directory is {run_dir or root / 'run'}, which is {then}")
            environ = _environ(root)
            if stand_in := find_stand_in(plan.scheduler):
                submit(stand_in, script, work, environ)
                statuses, timed_out = _run_jobs(stand_in, root, options.limit_s)
            else:
                statuses, timed_out = _run_local(root, script, work, environ, options.limit_s)
        return Result(tuple(statuses), timed_out, (root / FAILED).exists())
    finally:
        process_control.end_descendants(_STOP_S)
        process_control.reap()
        shutil.rmtree(root, ignore_errors=True)


def _kept_directory(plan: Plan, keep: Path | None) -> Path | None:
    if keep is not None and not _RUN_DIR.search(plan.text):
        raise RequestError(
            f"--keep {keep} was given, but {plan.name} does not set DDP_HPC_RUN_DIR as scripts of ddp-hpc "
            "render do; omit --keep"
        )
    # A run in the directory would be resumed.
    if keep is not None and keep.exists() and not (keep.is_dir() and not any(keep.iterdir())):
        raise RequestError(f"--keep {keep} is not an empty directory; choose a new one")
    return keep.absolute() if keep is not None else None


def _write_script(root: Path, plan: Plan, run: Path) -> Path:
    """Returns the script to submit: a copy of the user's script with another run directory."""
    copy = root / "submitted" / plan.name
    copy.parent.mkdir()
    # In the user's run directory, a rehearsal would resume the real run and overwrite its state.
    run_dir = f"export DDP_HPC_RUN_DIR={shlex.quote(str(run))}"
    text = _RUN_DIR.sub(lambda _: run_dir, plan.text)
    copy.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
    return copy


def _install(root: Path, plan: Plan, options: Options, keeper_pid: int) -> None:
    home, bin_, mpi_bin = root / "home", root / "bin", root / "mpi"
    for name in ("work", "tmp", DOWN):
        (root / name).mkdir()
    names = tuple(f"node{number}" for number in range(1, plan.num_nodes + 1))
    if stand_in := find_stand_in(plan.scheduler):
        kill_delay_s = plan.site.kill_delay_s if plan.site else 0
        settings = stand_in.settings(
            nodes=names,
            # Ranks without MPI find each other by their job ID, so simultaneous rehearsals need different
            # IDs. The logs of earlier jobs can be in the same directory.
            first_job=100_000 + secrets.randbelow(800_000),
            walltime_s=options.walltime_s or 0,
            max_jobs=options.max_jobs,
            keeper_pid=keeper_pid,
            **({"kill_delay_s": kill_delay_s} if kill_delay_s else {}),
        )
        settings.write(root)
        stand_in.install(root, bin_)
    install_stand_ins.install_mpiexec(root, mpi_bin, plan.mpiexec)
    with suppress(DdpHpcError):
        # As with an installed package, torchrun_script.sh must be on the PATH.
        (mpi_bin / STEP_SCRIPT).symlink_to(asset_directory("jobs") / STEP_SCRIPT)
    if not (Path(sys.executable).parent / "python").exists():
        install_stand_ins.program(mpi_bin / "python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    path: list[Path | str] = [
        mpi_bin,
        bin_,
        Path(sys.executable).parent,
        *os.environ.get("PATH", os.defpath).split(":"),
    ]
    install_stand_ins.write_profile(home, path)
    steps = DEFAULT_STEPS if options.stops_early else options.steps
    cores = len(os.sched_getaffinity(0))
    limits = Limits(
        ranks_per_node=plan.ranks_per_node,
        num_nodes=plan.num_nodes,
        requested_nodes=plan.requested_nodes,
        threads=max(1, cores // (plan.num_nodes * plan.ranks_per_node)),
        cpus=cores,
        arguments=options.arguments,
        trainer_arguments=("--max-steps", str(steps)) if steps else (),
        nodes=names,
        keeper_pid=keeper_pid,
        fail=options.fail or "",
        fail_after_s=options.fail_after_s,
    )
    limits.write(root)


def _environ(root: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not _OTHER_JOB.match(name)}
    return {**kept, "HOME": str(root / "home"), "TMPDIR": str(root / "tmp")}


def _run_jobs(stand_in: StandInScheduler, root: Path, limit_s: float) -> tuple[list[JobStatus], bool]:
    """Waits until every job has ended or is held, or until the time limit."""
    follower, end_s = _Follower(), time.monotonic() + limit_s
    while True:
        statuses = [stand_in.status(root, number) for number in jobs.numbers(root)]
        for job in statuses:
            follower.follow(job.name, job.logs)
        for log in root.glob("mom.*.log"):
            if log.stat().st_size:
                last = "".join(log.read_text(errors="replace").strip().splitlines()[-1:])
                raise DdpHpcError(
                    f"the simulated scheduler failed ({last}), so its jobs were killed. Please report this "
                    "bug of ddp-hpc."
                )
        if all(job.is_over or job.was_held for job in statuses):
            return statuses, False
        if time.monotonic() > end_s:
            return statuses, True
        time.sleep(_POLL_S)


def _run_local(
    root: Path, script: Path, work: Path, environ: dict[str, str], limit_s: float
) -> tuple[list[JobStatus], bool]:
    """Runs a script without directives with bash, as a user would do."""
    # torchrun_script.sh passes its arguments to the trainer. In other scripts, the launcher adds them.
    command = Limits.read(root).command([str(script)]) if script.name == STEP_SCRIPT else [str(script)]
    shell = subprocess.Popen(
        ["bash", "--login", "-c", 'exec bash "$@"', "bash", *command],
        cwd=work,
        # Without a scheduler, the supervisor would otherwise choose the mpiexec that works with mpi4py.
        env={**environ, "DDP_HPC_MPIEXEC": str(root / "mpi" / "mpiexec")},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=process_control.die_with_parent,
    )
    timed_out = False
    try:
        shell.wait(limit_s)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        process_control.send(signal.SIGKILL, process_control.of_session(shell.pid))
    code = shell.wait()
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    status = JobStatus(
        name="local", is_over=True, was_held=False, exit_code=code, how=how, logs=(), left_over=()
    )
    return [status], timed_out


@contextmanager
def _keeper() -> Iterator[int]:
    """Yields the ID of a child process that ends together with this process; daemons kill their jobs when it
    has ended.
    """
    process_control.adopt_orphans()
    keeper = subprocess.Popen(
        ["sleep", "infinity"], start_new_session=True, preexec_fn=process_control.die_with_parent
    )
    try:
        yield keeper.pid
    finally:
        keeper.kill()
        keeper.wait()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP end the rehearsal like Ctrl-C; later signals do not interrupt the cleanup."""

    def interrupt(_number: int, _frame: object) -> None:
        for number in watched:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in watched}
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            for number, handler in before.items():
                signal.signal(number, handler)
