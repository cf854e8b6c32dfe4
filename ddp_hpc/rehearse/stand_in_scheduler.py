"""The interface of every simulated scheduler: its commands, and the status of its jobs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.lint.parse_script import Script
from ddp_hpc.rehearse import install_stand_ins
from ddp_hpc.rehearse.settings import Settings

_SUBMIT_LIMIT_S = 120
# Each of these schedulers has a package of this name beside this module.
_SIMULATED = ("slurm", "pbs")


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The status of a job.

    `exit_code` is the exit code of its script; None if the script has not ended. `how` describes the end.
    `was_held` means that the job was not started because of --max-jobs. `left_over` has the command lines of
    processes that the job left running.
    """

    name: str
    is_over: bool
    was_held: bool
    exit_code: int | None
    how: str
    logs: tuple[Path, ...]
    left_over: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StandInScheduler:
    """The stand-in for one scheduler: its submit command, and a function that queries jobs."""

    submit: str
    status: Callable[[Path, int], JobStatus]
    settings: Callable[..., Settings]
    """Returns the settings of a machine; the arguments are fields of `Settings`."""
    package: str
    """The package with a module for each of the `commands`."""
    commands: tuple[str, ...]
    requested_nodes: Callable[[Script], int]
    array_indices: Callable[[Script], Sequence[int]]
    """Returns the indices of the job array that the script requests; empty if it requests none."""
    launcher: str = ""
    """The scheduler's own launcher; empty if ranks are started by mpiexec."""
    mpiexec: str
    """The kind of mpiexec that is usual with this scheduler."""

    def install(self, root: Path, directory: Path) -> None:
        """Writes the commands of the machine in `root` into a directory for the PATH."""
        for name in self.commands:
            install_stand_ins.command(directory / name, f"{self.package}.{name}", root)


def submit(stand_in: StandInScheduler, script: Path, directory: Path, environ: Mapping[str, str]) -> None:
    """Submits a script from a directory, in a login shell that finds the stand-ins, as a user would.

    Raises:
        RequestError: the scheduler refuses the script; the message contains its output.
        DdpHpcError: the scheduler does not answer.
    """
    argv = ["bash", "--login", "-c", 'exec "$@"', "bash", stand_in.submit, str(script)]
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
            f"{stand_in.submit} did not answer within {_SUBMIT_LIMIT_S} s; try again"
        ) from error
    if done.returncode:
        lines = [
            line.strip() for line in done.stderr.encode("ascii", "backslashreplace").decode().splitlines()
        ]
        raise RequestError(f"the script was rejected: {'; '.join(filter(None, lines))}; correct the script")


def find_stand_in(scheduler: str) -> StandInScheduler | None:
    """Returns the stand-in of the scheduler with this name; None if there is none."""
    if scheduler not in _SIMULATED:
        return None
    stand_in: StandInScheduler = import_module(f"ddp_hpc.rehearse.{scheduler}.rehearsal_adapter").STAND_IN
    return stand_in
