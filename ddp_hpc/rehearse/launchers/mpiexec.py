"""Stand-in for the `mpiexec` of PALS, Open MPI and MPICH: starts the ranks with the real Hydra of MPICH.

The variables of rank r place it on node r // ppn. As with Open MPI, ranks on other nodes receive only the
variables that are named with `-x`. The ranks always use MPICH, which would abort if PMIX_NAMESPACE were set.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.rehearse.launchers.failure import Failure
from ddp_hpc.rehearse.launchers.fit_to_machine import HERE, Limits
from ddp_hpc.rehearse.launchers.options import Line, Table, read_line, spellings
from ddp_hpc.rehearse.launchers.start_ranks import Place, Step, places, run_step, spool_directory

# Options of `mpiexec -help` of MPICH, of HPE's user guides, and of mpirun(1) of Open MPI 5.0. Options that
# only change bindings or files on the nodes have no effect.
_TABLES = {
    "hydra": Table(
        program="mpiexec",
        values=spellings(
            "n:np ppn hostfile:f:machinefile hosts:host wdir bind-to map-by membind launcher:bootstrap "
            "launcher-exec rmk iface envlist:genvlist"
        ),
        pairs=spellings("env:genv"),
        bare=spellings("genvall envall label:l:prepend-rank verbose:v print-all-exitcodes version"),
    ),
    "pals": Table(
        program="mpiexec",
        values=spellings(
            "n:np ppn depth:d cpu-bind mem-bind gpu-bind env hostfile:f hosts:host:hostlist pmi wdir rlimits"
        ),
        bare=spellings(
            "envall genvall label:l line-buffer no-vni transfer no-transfer exclusive version "
            "abort-on-failure no-abort-on-failure"
        ),
    ),
    "openmpi": Table(
        program="mpiexec",
        values=spellings(
            "n:np:c ppn:N:npernode map-by bind-to rank-by cpu-set hosts:host:H "
            "hostfile:machinefile:default-hostfile x wdir:wd prefix path output output-filename timeout tune"
        ),
        pairs=spellings("mca gmca prtemca pmixmca omca"),
        bare=spellings(
            "allow-run-as-root oversubscribe nooversubscribe label:tag-output report-bindings "
            "use-hwthread-cpus display-map display-allocation version verbose:v quiet:q nolocal"
        ),
    ),
}
_VERSIONS = {
    "hydra": "HYDRA build details:\n    Version: a stand-in over the mpich wheel's",
    "pals": "mpiexec version 1.3.2 revision 0",
    "openmpi": "mpiexec (Open MPI) 5.0.11",
}
# Ranks of Open MPI on other nodes are started by ssh, whose login shell sets only these variables.
_LOGIN_VARIABLES = (
    *("HOME", "USER", "LOGNAME", "SHELL", "LANG"),
    *("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
)


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """The options of one launch, and the environment that all ranks have in common."""

    line: Line
    spool: Path
    num_ranks: int
    base: Mapping[str, str]


def main(argv: Sequence[str], environ: Mapping[str, str], root: Path) -> int:
    """Runs the ranks and returns the largest exit code; `argv` begins with the kind of mpiexec.

    Raises:
        RefusedError: there is no command, an option is unknown, or the ranks do not fit on the nodes.
    """
    kind, *words = argv
    line, limits = read_line(words, _TABLES[kind]), Limits.read(root)
    if "version" in line.values:
        sys.stdout.write(f"{_VERSIONS[kind]}\n")
        return 0
    if not line.command:
        raise line.table.refuse("no executable specified")
    hosts = _hosts(line, environ)
    num_nodes = max(len(hosts), limits.requested_nodes)
    num_ranks, per_node = _sizes(line, num_nodes, kind)
    ranks = places(limits.counts(num_ranks, per_node))
    command = limits.command(line.command)
    base = limits.environment({**environ, **_given(line)})
    if kind == "openmpi" and limits.ranks_per_node and "ddp_hpc.train" in command:
        # Automatic discovery would detect MPICH. Without MPI, the rendezvous of the ranks needs a fixed port.
        command += [] if "--discovery" in command else ["--discovery", "openmpi"]
        base.setdefault("MASTER_PORT", str(_free_port()))
    launch = _Launch(line=line, spool=spool_directory(root, f"{kind}."), num_ranks=len(ranks), base=base)

    def host_of(place: Place) -> str:
        return hosts[place.node % len(hosts)]

    def report(rank: int, code: int) -> None:
        how = f"exited with code {code}" if code > 0 else f"died from signal {-code}"
        sys.stderr.write(f"{host_of(ranks[rank])}: rank {rank} {how}\n")

    failure = Failure(root, launch.spool, limits, command, environ, [host_of(place) for place in ranks])
    step = Step(
        command=command,
        look=failure.look,
        environments=[
            {**_ENVIRONMENTS[kind](launch, place), **limits.of_node(host_of(place))} for place in ranks
        ],
        report=report,
        stop_on_failure=kind != "hydra" and "no-abort-on-failure" not in line.values,
        label="label" in line.values,
        directory=line.values.get("wdir", ""),
        keeper_pid=limits.keeper_pid,
    )
    return run_step(launch.spool, step)


def _hosts(line: Line, environ: Mapping[str, str]) -> list[str]:
    """Returns the distinct hosts of --hosts, the host file or the job, in order; this machine outside jobs.

    Raises:
        RefusedError: the file cannot be read.
    """
    if named := line.values.get("hosts"):
        return list(dict.fromkeys(named.split(",")))
    path = line.values.get("hostfile") or environ.get("PBS_NODEFILE")
    if not path:
        count = environ.get("SLURM_JOB_NUM_NODES", "1")
        return [f"node{index}" for index in range(1, int(count) + 1 if count.isdecimal() else 2)]
    try:
        return list(dict.fromkeys(Path(path).read_text().split())) or [HERE]
    except OSError as error:
        raise line.table.refuse(f"cannot read {path}: {error.strerror}") from error


def _sizes(line: Line, num_nodes: int, kind: str) -> tuple[int, int]:
    """Returns the number of ranks, and of ranks per node."""
    ppr = re.match(r"ppr:([1-9][0-9]{0,6}):(?:node|l3cache|package|socket)\b", line.values.get("map-by", ""))
    given = line.number("ppn", int(ppr[1]) if ppr else 1) if ppr or "ppn" in line.values else 0
    default = {"pals": 1, "openmpi": max(1, given) * num_nodes, "hydra": num_nodes}[kind]
    num_ranks = line.number("n", default)
    per_node = given or -(-num_ranks // num_nodes)
    if kind != "hydra" and num_ranks > per_node * num_nodes:
        raise line.table.refuse(f"{num_ranks} ranks do not fit on {num_nodes} nodes with {per_node} each")
    return num_ranks, per_node


def _given(line: Line) -> dict[str, str]:
    """Returns the variables that options set: `-env A B`, `--env A=B` or `-x A=B`."""
    separator = " " if "env" in line.table.pairs else "="
    words = [*line.all_of("env"), *line.all_of("x")]
    return dict(word.split(separator, 1) for word in words if separator in word)


def _of_hydra(launch: _Launch, place: Place) -> dict[str, str]:
    size = str(place.local_size)
    return {**launch.base, "MPI_LOCALRANKID": str(place.local_rank), "MPI_LOCALNRANKS": size}


def _of_pals(launch: _Launch, place: Place) -> dict[str, str]:
    local_rank, local_size = str(place.local_rank), str(place.local_size)
    return {
        **launch.base,
        "PALS_APID": str(uuid.uuid5(uuid.NAMESPACE_OID, str(launch.spool))),
        "PALS_DEPTH": launch.line.values.get("depth", "1"),
        "PALS_LOCAL_RANKID": local_rank,
        "PALS_LOCAL_SIZE": local_size,
        "PALS_NODEID": str(place.node),
        "PALS_RANKID": str(place.rank),
        "PALS_SPOOL_DIR": str(launch.spool),
        "PMI_LOCAL_RANK": local_rank,
        "PMI_LOCAL_SIZE": local_size,
    }


def _of_openmpi(launch: _Launch, place: Place) -> dict[str, str]:
    passed_on = {word.partition("=")[0] for word in launch.line.all_of("x")} | {*_LOGIN_VARIABLES}
    kept = {
        name: value
        for name, value in launch.base.items()
        if place.node == 0 or name in passed_on or name.startswith("OMPI_")
    }
    return {
        "PATH": os.defpath,
        **kept,
        "OMPI_COMM_WORLD_LOCAL_RANK": str(place.local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(place.local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(place.local_rank),
        "OMPI_COMM_WORLD_RANK": str(place.rank),
        "OMPI_COMM_WORLD_SIZE": str(launch.num_ranks),
        "OMPI_UNIVERSE_SIZE": str(launch.num_ranks),
        "PMIX_RANK": str(place.rank),
        "PRTE_LAUNCHED": "1",
    }


_ENVIRONMENTS: Mapping[str, Callable[[_Launch, Place], dict[str, str]]] = {
    "hydra": _of_hydra,
    "pals": _of_pals,
    "openmpi": _of_openmpi,
}


def _free_port() -> int:
    with socket.create_server((HERE, 0)) as server:
        port: int = server.getsockname()[1]
        return port
