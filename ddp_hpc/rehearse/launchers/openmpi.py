"""Stand-in for `mpiexec` of Open MPI 5, with its options and variables. The ranks use MPICH.

As with Open MPI, ranks on other nodes receive only the variables that are named with `-x`. PMIX_NAMESPACE is
not set, because MPICH would abort.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse.launchers.fit_to_machine import HERE, Limits
from ddp_hpc.rehearse.launchers.hydra import num_nodes_of
from ddp_hpc.rehearse.launchers.options import Line, RefusedError, Table, run_launcher, spellings
from ddp_hpc.rehearse.launchers.start_ranks import Place, Step, places, run_step, spool_directory

_RULE = "-" * 74
_ERROR = f"{_RULE}\n{{what}}\n{_RULE}"

# The options of mpirun(1) of Open MPI 5.0. All other options are rejected as unknown.
TABLE = Table(
    values={
        "num_ranks": ("n", "np", "c"),
        "per_node": ("N", "npernode"),
        "map_by": ("map-by",),
        "bind": ("bind-to", "rank-by", "cpu-set"),
        "hosts": ("host", "H"),
        "hostfile": ("hostfile", "machinefile", "default-hostfile"),
        "x": ("x",),
        "wdir": ("wdir", "wd"),
        "prefix": ("prefix", "path", "output", "output-filename", "timeout", "personality"),
        "tune": ("tune", "am", "pmix", "dvm-uri"),
    },
    pairs=frozenset(("mca", "gmca", "prtemca", "pmixmca", "omca")),
    bare=spellings(
        "allow-run-as-root oversubscribe nooversubscribe tag-output report-bindings use-hwthread-cpus "
        "display-map display-allocation version v q verbose quiet nolocal novm enable-recovery "
        "disable-recovery forward-signals"
    ),
    bad_option=_ERROR.format(
        what="An unrecognized option was included on the mpiexec command line:\n\n  Option: {word}\n\n"
        'Please use the "mpiexec --help" command to obtain a list of all\nsupported options.'
    ),
    bad_number=_ERROR.format(what="The value given for {name} is not a number of processes: {text}"),
    exit_codes=(213, 213),
    version="mpiexec (Open MPI) 5.0.11",
)
# Ranks on other nodes are started by ssh, whose login shell sets only these variables.
_LOGIN_VARIABLES = (
    *("HOME", "USER", "LOGNAME", "SHELL", "LANG"),
    *("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
)


def launch(line: Line, root: Path) -> int:
    """Runs the ranks and returns the largest exit code. A rank that fails ends all others.

    Raises:
        RefusedError: there is no command, or more ranks than slots.
    """
    limits = Limits.read(root)
    num_nodes = max(num_nodes_of(line), limits.requested_nodes)
    if not line.command:
        raise _refused("No executable was specified on the mpiexec command line.")
    ppr = re.match(r"ppr:([1-9][0-9]{0,6}):(?:node|l3cache|package|socket)\b", line.values.get("map_by", ""))
    default = int(ppr[1]) if ppr else 0
    per_node = line.number("per_node", default) if default or "per_node" in line.values else 0
    num_ranks = line.number("num_ranks", max(1, per_node) * num_nodes)
    per_node = per_node or -(-num_ranks // num_nodes)
    if num_ranks > per_node * num_nodes:
        raise _refused(
            f"Your job has requested more processes than the ppr for\nthis topology can support: {num_ranks}"
        )
    passed_on = {word.partition("=")[0] for word in line.all_of("x")}
    given = dict(word.split("=", 1) for word in line.all_of("x") if "=" in word)
    here = limits.environment({**os.environ, **given})
    ranks = places(limits.counts(num_ranks, per_node))
    command = limits.command(line.command)
    if limits.ranks_per_node and "ddp_hpc.train" in command and "--discovery" not in command:
        # Automatic discovery would detect MPICH. Without MPI, the rendezvous of the ranks needs a fixed port.
        command += ["--discovery", "openmpi"]
        here.setdefault("MASTER_PORT", str(_free_port()))
    step = Step(
        command=command,
        environments=[_environment(here, passed_on, place, len(ranks)) for place in ranks],
        report=_report,
        stop_on_failure=True,
        label="tag-output" in line.flags,
        directory=line.values.get("wdir", ""),
        keeper_pid=limits.keeper_pid,
    )
    return run_step(spool_directory(root, "ompi."), step)


def _environment(base: Mapping[str, str], passed_on: set[str], place: Place, size: int) -> dict[str, str]:
    known = {
        name: value
        for name, value in base.items()
        if place.node == 0 or name in passed_on or name in _LOGIN_VARIABLES or name.startswith("OMPI_")
    }
    known.setdefault("PATH", os.defpath)
    return known | {
        "OMPI_COMM_WORLD_LOCAL_RANK": str(place.local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(place.local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(place.local_rank),
        "OMPI_COMM_WORLD_RANK": str(place.rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_UNIVERSE_SIZE": str(size),
        "PMIX_RANK": str(place.rank),
        "PRTE_LAUNCHED": "1",
    }


def _free_port() -> int:
    with socket.create_server((HERE, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _report(rank: int, code: int) -> None:
    how = f"exit code {code}" if code > 0 else f"signal {-code}"
    sys.stderr.write(f"{_RULE}\nprterun detected that rank {rank} ended with {how}\n{_RULE}\n")


def _refused(message: str) -> RefusedError:
    return RefusedError(_ERROR.format(what=message), 213)


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> int:
    """Runs the stand-in, which is installed as `mpiexec` and `mpirun`."""
    return run_launcher(argv, root, TABLE, launch)
