"""`mpiexec` of MPICH: the real Hydra with its own options and variables, on simulated nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ddp_hpc.rehearse.launchers import options
from ddp_hpc.rehearse.launchers.limits import read_limits
from ddp_hpc.rehearse.launchers.options import Line, RefusedError, Table, spellings
from ddp_hpc.rehearse.launchers.ranks import Step, places, run_step, spool_directory

DIRECTORY_VARIABLE = "HYDRA_STAND_IN_HOME"  # set by the installed mpiexec

# The options of `mpiexec -help` that are useful in job scripts. Others are refused as unknown.
TABLE = Table(
    values={
        "num_ranks": ("n", "np"),
        "ppn": ("ppn",),
        "hostfile": ("f", "hostfile", "machinefile"),
        "hosts": ("hosts", "host"),
        "wdir": ("wdir",),
        "bind": ("bind-to", "map-by", "membind"),
        "transport": ("launcher", "launcher-exec", "bootstrap", "rmk", "iface"),
        "envlist": ("genvlist", "envlist"),
    },
    pairs=frozenset(("genv", "env")),
    bare=spellings("genvall envall prepend-rank:l v verbose print-all-exitcodes version"),
)


def launch(line: Line, root: Path) -> int:
    """Runs the ranks and returns the largest exit code (the real Hydra returns their bitwise OR).

    Raises:
        RefusedError: there is no command, or a number is invalid.
    """
    limits, nodes = read_limits(root), num_nodes_of(line)
    num_nodes = max(nodes, limits.requested_nodes)
    num_ranks = line.number("num_ranks", num_nodes, _bad_number)
    ppn = line.number("ppn", -(-num_ranks // num_nodes), _bad_number)
    if not line.command:
        raise _refused("no executable provided")
    given = dict(pair.split(" ", 1) for name in ("genv", "env") for pair in line.all_of(name))
    base = {name: value for name, value in os.environ.items() if name != DIRECTORY_VARIABLE} | given
    environments = [
        limits.environment(base)
        | {"MPI_LOCALRANKID": str(place.local_rank), "MPI_LOCALNRANKS": str(place.local_size)}
        for place in places(limits.counts(num_ranks, ppn))
    ]
    step = Step(
        command=limits.command(line.command),
        environments=environments,
        report=lambda _rank, _code: None,  # Hydra itself prints a banner
        stop_on_failure=False,
        label="prepend-rank" in line.flags,
        directory=line.values.get("wdir", ""),
        keeper_pid=limits.keeper_pid,
    )
    return run_step(spool_directory(root, "hydra."), step)


def num_nodes_of(line: Line) -> int:
    """Returns the number of nodes from --hosts, the host file, or the job."""
    if named := line.values.get("hosts"):
        return len(set(named.split(",")))
    path = line.values.get("hostfile") or os.environ.get("PBS_NODEFILE")
    if path:
        try:
            return len(set(Path(path).read_text().split())) or 1
        except OSError as error:
            raise _refused(f"unable to open host file: {path}") from error
    count = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    return int(count) if count.isdecimal() and int(count) else 1


def _refused(message: str) -> RefusedError:
    return RefusedError(f"[mpiexec@{os.uname().nodename}] {message}", 255)


def _bad_number(text: str, name: str) -> RefusedError:
    return _refused(f"{name}: {text} is not a number of ranks")


def read_line(argv: Sequence[str]) -> Line:
    """Returns the parsed command line.

    Raises:
        RefusedError: Hydra does not have an option, or a value is missing.
    """
    try:
        return options.read_line(argv, TABLE)
    except (options.UnknownOptionError, options.MissingValueError) as error:
        name = str(error).lstrip("-").partition("=")[0]
        raise _refused(f"match_arg (args.c): unrecognized argument {name}") from None


def main() -> NoReturn:
    """The entry point of the installed command."""
    options.run(
        read_line,
        launch,
        "HYDRA build details:\n    Version: a stand-in over the mpich wheel's",
        DIRECTORY_VARIABLE,
    )
