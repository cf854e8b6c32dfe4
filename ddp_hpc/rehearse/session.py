"""One rehearsal: the folder, the submission, the log while it grows, and an end that leaves nothing."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ddp_hpc.assets import asset_directory
from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.rehearse import jobs, machine, processes
from ddp_hpc.rehearse.launchers.limits import STEP_SCRIPT, Limits, read_limits, write_limits
from ddp_hpc.rehearse.launchers.ranks import HYDRA
from ddp_hpc.rehearse.queues import QUEUES, Queue, Seen, Setup, submit
from ddp_hpc.rehearse.request import Plan, Wishes
from ddp_hpc.units import format_bytes

DEFAULT_STEPS, DEFAULT_MAX_JOBS, DEFAULT_LIMIT_S = 3, 3, 900
_POLL_S = 0.1
_STOP_S = 10.0
_MAX_LOG_BYTES = 64 * 1024**2
# A job of a real machine knows nothing of the one in which it is rehearsed.
_OF_ANOTHER_JOB = re.compile(
    r"SLURM|SRUN_|SBATCH_|PBS_|PMI|PALS_|OMPI_|PRTE_|HYD|MPI_LOCAL|TORCHELASTIC_|DDP_HPC_|MASTER_|BASH_FUNC_"
    r"|(?:\w+_)?RANK$|(?:LOCAL_|GROUP_)?WORLD_SIZE$|BASH_ENV$|ENV$"
)

# Of scripts that `ddp-hpc render` writes.
_RUN_DIR = re.compile(r"^export DDP_HPC_RUN_DIR=.*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a rehearsal is done, beside what of the script is done."""

    max_jobs: int = DEFAULT_MAX_JOBS
    limit_s: float = DEFAULT_LIMIT_S
    keep: bool = False
    here: bool = False


@dataclass(frozen=True)
class Result:
    """How the jobs ended; `folder` is None where it was removed."""

    jobs: tuple[Seen, ...]
    timed_out: bool
    folder: Path | None


@dataclass
class _Follower:
    """Copies what is added to some files to stdout."""

    files: dict[tuple[str, int], IO[bytes]] = field(default_factory=dict)
    num_bytes: int = 0

    def follow(self, job: str, paths: tuple[Path, ...]) -> None:
        """Takes up the job's logs once they are there: PBS moves them to their place at the end."""
        for index, path in enumerate(paths):
            with suppress(OSError):
                if (job, index) not in self.files:
                    self.files[job, index] = path.open("rb")
        for file in self.files.values():
            if os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)  # a requeued job of Slurm begins its log anew
            # Not to the end: a job may write faster than this is read.
            piece = file.read(_MAX_LOG_BYTES)
            sys.stdout.buffer.write(piece)
            self.num_bytes += len(piece)
        sys.stdout.flush()
        if self.num_bytes > _MAX_LOG_BYTES:
            raise DdpHpcError(
                f"the jobs have written more than {format_bytes(_MAX_LOG_BYTES)} to their logs; they were "
                "killed; let them say less"
            )


def rehearse(plan: Plan, wishes: Wishes, options: Options) -> Result:
    """Runs the script's jobs to their end.

    Raises:
        RequestError: the script is refused, or there is no MPI to start ranks with.
        DdpHpcError: the rehearsal itself failed.
        KeyboardInterrupt: Ctrl-C and SIGTERM; no process is left then, and no file.
    """
    if not sys.platform.startswith("linux"):
        raise RequestError(
            "jobs are rehearsed on Linux alone, as their processes are followed in /proc; use Linux"
        )
    if not HYDRA.exists():
        raise RequestError(
            f"{HYDRA} does not exist, and ranks are started by it; pip install 'ddp-hpc[mpich]'"
        )
    root = Path(tempfile.mkdtemp(prefix="rehearse-"))
    folder = None
    try:
        with _ended_by_signals(), _keeper() as keeper_pid:
            _install(root, plan, wishes, options, keeper_pid)
            work = Path.cwd() if options.here else root / "work"
            script = root / "submitted" / plan.name
            script.parent.mkdir()
            # In a run folder of the user's the real job would go on from here, or have nothing left to do.
            run_dir = f"export DDP_HPC_RUN_DIR={shlex.quote(str(root / 'run'))}"
            text = _RUN_DIR.sub(lambda _: run_dir, plan.text)
            script.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
            environ = _environ(root)
            if plan.scheduler in QUEUES:
                queue = QUEUES[plan.scheduler]
                submit(queue, script, work, environ)
                seen, timed_out = _run_jobs(queue, root, options.limit_s)
            else:
                seen, timed_out = _run_local(root, script, work, environ, options.limit_s)
        if options.keep:
            folder = root
        return Result(tuple(seen), timed_out, folder)
    finally:
        processes.end_descendants(_STOP_S)
        processes.reap()
        if folder is None:
            shutil.rmtree(root, ignore_errors=True)


def _install(root: Path, plan: Plan, wishes: Wishes, options: Options, keeper_pid: int) -> None:
    home, bin_, mpi_bin = root / "home", root / "bin", root / "mpi"
    for folder in ("work", "tmp"):
        (root / folder).mkdir()
    names = tuple(f"node{number}" for number in range(1, plan.num_nodes + 1))
    if plan.scheduler in QUEUES:
        setup = Setup(
            nodes=names,
            walltime_s=wishes.walltime_s or 0,
            max_jobs=options.max_jobs,
            keeper_pid=keeper_pid,
            kill_delay_s=float(plan.site.kill_delay_s) if plan.site else 0.0,
        )
        QUEUES[plan.scheduler].install(root, bin_, mpi_bin, setup)
    machine.install_mpiexec(root, mpi_bin, plan.mpiexec)
    with suppress(DdpHpcError):
        # The package installs it beside its commands.
        (mpi_bin / STEP_SCRIPT).symlink_to(asset_directory("jobs") / STEP_SCRIPT)
    if not (Path(sys.executable).parent / "python").exists():
        machine.program(mpi_bin / "python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    # PBS's own mpiexec, which is none, comes after the right one.
    path: list[Path | str] = [
        mpi_bin,
        bin_,
        Path(sys.executable).parent,
        *os.environ.get("PATH", os.defpath).split(":"),
    ]
    machine.write_profile(home, path)
    steps = DEFAULT_STEPS if wishes.steps is None and wishes.walltime_s is None else wishes.steps
    cores = len(os.sched_getaffinity(0))
    write_limits(
        root,
        Limits(
            ranks_per_node=plan.ranks_per_node,
            num_nodes=plan.num_nodes,
            asked_nodes=plan.asked_nodes,
            threads=max(1, cores // (plan.num_nodes * plan.ranks_per_node)),
            arguments=wishes.arguments,
            of_trainer=("--max-steps", str(steps)) if steps else (),
            nodes=names,
            keeper_pid=keeper_pid,
        ),
    )


def _environ(root: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not _OF_ANOTHER_JOB.match(name)}
    return {**kept, "HOME": str(root / "home"), "TMPDIR": str(root / "tmp")}


def _run_jobs(queue: Queue, root: Path, limit_s: float) -> tuple[list[Seen], bool]:
    """Looks until every job is over or held, or the time is up."""
    follower, end_s = _Follower(), time.monotonic() + limit_s
    while True:
        queue.schedule(root)
        seen = [queue.look(root, number) for number in jobs.numbers(root)]
        for job in seen:
            follower.follow(job.name, job.logs)
        for log in root.glob("mom.*.log"):
            if log.stat().st_size:
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise DdpHpcError(f"the scheduler's stand-in failed ({last}); what it ran was killed")
        if all(job.is_over or job.was_held for job in seen):
            return seen, False
        if time.monotonic() > end_s:
            return seen, True
        time.sleep(_POLL_S)


def _run_local(
    root: Path, script: Path, work: Path, environ: dict[str, str], limit_s: float
) -> tuple[list[Seen], bool]:
    """The script by bash, as its user runs it."""
    log, end_s = root / "job.log", time.monotonic() + limit_s
    # This script's arguments are the trainer's; others start their ranks by a launcher, which adds them.
    command = read_limits(root).command([str(script)]) if script.name == STEP_SCRIPT else [str(script)]
    words = ["bash", "--login", "-c", 'exec bash "$@"', "bash", *command]
    follower = _Follower()
    with log.open("wb") as output:
        shell = subprocess.Popen(
            words,
            cwd=work,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
        )
    try:
        while shell.poll() is None and time.monotonic() < end_s:
            follower.follow("local", (log,))
            time.sleep(_POLL_S)
    finally:
        timed_out = shell.poll() is None
        if timed_out:
            processes.send(signal.SIGKILL, processes.of_session(shell.pid))
    code = shell.wait()
    follower.follow("local", (log,))
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    seen = Seen(
        name="local", is_over=True, was_held=False, exit_code=code, how=how, logs=(log,), left_over=()
    )
    return [seen], timed_out


@contextmanager
def _keeper() -> Iterator[int]:
    """A process on which all jobs hang: when it ends, and it ends with this one, they are killed."""
    processes.adopt_orphans()
    keeper = subprocess.Popen(
        ["sleep", "infinity"], start_new_session=True, preexec_fn=processes.die_with_parent
    )
    try:
        yield keeper.pid
    finally:
        keeper.kill()
        keeper.wait()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a rehearsal as Ctrl-C does; a second one does not disturb the end."""

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
