"""Stand-in for `mpiexec` of MPICH: the real Hydra, with its options and variables, on simulated nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse.launchers.fit_to_machine import Limits
from ddp_hpc.rehearse.launchers.options import Line, RefusedError, Table, run_launcher, spellings
from ddp_hpc.rehearse.launchers.start_ranks import Step, places, run_step, spool_directory

_ERROR = f"[mpiexec@{os.uname().nodename}] {{what}}"

# The options of `mpiexec -help` that are useful in job scripts. All other options are rejected as unknown.
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
    bad_option=_ERROR.format(what="match_arg (args.c): unrecognized argument {name}"),
    bad_number=_ERROR.format(what="{name}: {text} is not a number of ranks"),
    exit_codes=(255, 255),
    version="HYDRA build details:\n    Version: a stand-in over the mpich wheel's",
)


def launch(line: Line, root: Path) -> int:
    """Runs the ranks and returns their largest exit code, while the real Hydra returns the bitwise OR of all.

    Raises:
        RefusedError: there is no command, or a number is invalid.
    """
    limits, nodes = Limits.read(root), num_nodes_of(line)
    num_nodes = max(nodes, limits.requested_nodes)
    num_ranks = line.number("num_ranks", num_nodes)
    ppn = line.number("ppn", -(-num_ranks // num_nodes))
    if not line.command:
        raise _refused("no executable provided")
    given = dict(pair.split(" ", 1) for name in ("genv", "env") for pair in line.all_of(name))
    environments = [
        limits.environment({**os.environ, **given})
        | {"MPI_LOCALRANKID": str(place.local_rank), "MPI_LOCALNRANKS": str(place.local_size)}
        for place in places(limits.counts(num_ranks, ppn))
    ]
    step = Step(
        command=limits.command(line.command),
        environments=environments,
        report=lambda _rank, _code: None,  # the real Hydra prints a message
        stop_on_failure=False,
        label="prepend-rank" in line.flags,
        directory=line.values.get("wdir", ""),
        keeper_pid=limits.keeper_pid,
    )
    return run_step(spool_directory(root, "hydra."), step)


def num_nodes_of(line: Line) -> int:
    """Returns the number of nodes in --hosts, in the host file, or in the allocation of the job."""
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
    return RefusedError(_ERROR.format(what=message), 255)


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> int:
    """Runs the stand-in, which is installed as `mpiexec` and `mpirun`."""
    return run_launcher(argv, root, TABLE, launch)
