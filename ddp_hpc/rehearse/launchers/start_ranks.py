"""Starts the ranks of a launcher with the real Hydra, each in its own environment.

The ranks are not in the session of the job, so only the launcher's stand-in receives the signals of the
scheduler. Like the real launcher, it either forwards them or ends the ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base import process_control

HYDRA = Path(sys.executable).with_name("mpiexec")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STOP_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """The position of a rank on the simulated nodes."""

    rank: int
    node: int
    local_rank: int
    local_size: int


def places(counts: Sequence[int]) -> list[Place]:
    """Returns the positions of all ranks, given the number of ranks on each node."""
    assigned: list[Place] = []
    for node, count in enumerate(counts):
        assigned += [
            Place(rank=len(assigned) + i, node=node, local_rank=i, local_size=count) for i in range(count)
        ]
    return assigned


@dataclass(frozen=True, kw_only=True)
class Step:
    """Ranks that are started together.

    `look` is called again and again while the ranks run, and `report` with a rank and its non-zero exit code,
    or its negated signal. On one of the signals in `kills_on`, the launcher kills the ranks with SIGKILL
    instead of forwarding the signal. It also kills them when the process `keeper_pid` has ended. With
    `counts_stopped`, the codes of ranks that are ended after a failure count too. Without `keep_pmi`, the
    ranks cannot use MPI.
    """

    command: Sequence[str]
    look: Callable[[], None]
    environments: Sequence[Mapping[str, str]]
    report: Callable[[int, int], None]
    stop_on_failure: bool
    counts_stopped: bool = False
    keep_pmi: bool = True
    kills_on: tuple[int, ...] = ()
    label: bool = False
    directory: str = ""
    keeper_pid: int = 0


def spool_directory(root: Path, prefix: str) -> Path:
    """Creates a directory for one step. `run_step` removes it."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=root))


def run_step(spool: Path, step: Step) -> int:
    """Runs the ranks and returns the largest exit code of those that ended by themselves."""
    process_control.adopt_orphans()
    settings = {
        "environments": [dict(environment) for environment in step.environments],
        "keep_pmi": step.keep_pmi,
        "directory": step.directory or str(Path.cwd()),
    }
    (spool / "step.json").write_text(json.dumps(settings))
    argv = [str(HYDRA), "-launcher", "fork", "-hosts", "localhost", "-n", str(len(step.environments))]
    if step.label:
        argv.append("-prepend-rank")
    argv += [sys.executable, "-I", "-S", str(Path(__file__).with_name("run_rank.py")), str(spool)]
    try:
        hydra = subprocess.Popen(
            [*argv, *step.command],
            env=_for_hydra(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=process_control.die_with_parent,  # the scheduler's SIGKILL reaches only this process
        )

        def on_signal(sent: int, _frame: object) -> None:
            if sent in step.kills_on:
                process_control.send(signal.SIGKILL, process_control.descendants(os.getpid()))
            else:
                hydra.send_signal(sent)

        for number in _SIGNALS:
            signal.signal(number, on_signal)
        return _watch(hydra, spool, step)
    finally:
        shutil.rmtree(spool, ignore_errors=True)


def processes_of(files: Iterable[Path]) -> list[process_control.Process]:
    """Returns the processes of the ranks with these files, SPOOL/pid.R for rank R, and their descendants."""
    ranks = set()
    for file in files:
        with suppress(OSError, ValueError):
            ranks.add(int(file.read_text()))
    children = process_control.descendants(*ranks) if ranks else []
    return [process for process in process_control.processes() if process.pid in ranks] + children


def _for_hydra() -> dict[str, str]:
    # Hydra gets no other variables, since they could make it detect a real scheduler.
    return {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}


def _watch(hydra: subprocess.Popen[bytes], spool: Path, step: Step) -> int:
    reported: set[str] = set()
    codes = {0}
    stop_by_s, stopped = float("inf"), set[int]()
    while True:
        over = hydra.poll() is not None
        for file in sorted(spool.glob("rank.*"), key=lambda file: int(file.suffix[1:])):
            code = int(file.read_text())
            if code and file.name not in reported:
                reported.add(file.name)
                step.report(int(file.suffix[1:]), code)
                if step.counts_stopped or stop_by_s == float("inf"):
                    codes.add(code if code > 0 else 128 - code)
        if over:
            return max(codes) or (hydra.returncode if hydra.returncode >= 0 else 128 - hydra.returncode)
        if step.stop_on_failure and reported and stop_by_s == float("inf"):
            stop_by_s = time.monotonic() + _STOP_S
        if stop_by_s != float("inf"):  # repeat this, since ranks can start after the first failure
            late = [process for process in processes_of(spool.glob("pid.*")) if process.pid not in stopped]
            process_control.send(signal.SIGTERM, late)
            stopped |= {process.pid for process in late}
        if time.monotonic() > stop_by_s:
            hydra.kill()
        step.look()
        if step.keeper_pid and not process_control.is_running(step.keeper_pid):
            process_control.send(signal.SIGKILL, process_control.descendants(os.getpid()))
        time.sleep(0.02)
