"""Stand-in for `mpiexec` of PALS, with its options and variables.

The variables of rank r place it on host r // ppn of the node file. PMI_RANK, PMI_SIZE and PMI_FD are set even
with --pmi=pmix, because MPI could not start without them.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse.launchers.fit_to_machine import Limits
from ddp_hpc.rehearse.launchers.options import Line, RefusedError, Table, run_launcher, spellings
from ddp_hpc.rehearse.launchers.start_ranks import Place, Step, places, run_step, spool_directory

_ERROR = "mpiexec: {what}\nTry 'mpiexec --help' for more information."

# The supported options of PALS; all other options are rejected. CPU, memory and GPU bindings have no effect.
TABLE = Table(
    values={
        "num_ranks": ("n", "np"),
        "ppn": ("ppn",),
        "depth": ("d", "depth"),
        "cpu_bind": ("cpu-bind",),
        "mem_bind": ("mem-bind",),
        "gpu_bind": ("gpu-bind",),
        "env": ("env",),
        "hostfile": ("f", "hostfile"),
        "hosts": ("host", "hosts", "hostlist"),
        "pmi": ("pmi",),
        "wdir": ("wdir",),
        "rlimits": ("rlimits",),
    },
    bare=spellings(
        "envall genvall label:l line-buffer no-vni transfer no-transfer exclusive version "
        "abort-on-failure no-abort-on-failure"
    ),
    bad_option=_ERROR,
    bad_number=_ERROR.format(what="invalid argument '{text}' for {name}"),
    version="mpiexec version 1.3.2 revision 0",
)


def _refused(message: str) -> RefusedError:
    return RefusedError(_ERROR.format(what=message))


def hosts(line: Line) -> list[str]:
    """Returns the distinct hosts of --hosts, the host file or the job's node file, in order.

    Raises:
        RefusedError: there is neither an option with hosts nor a PBS job, or the file cannot be read.
    """
    if named := line.values.get("hosts"):
        return list(dict.fromkeys(named.split(",")))
    path = line.values.get("hostfile") or os.environ.get("PBS_NODEFILE")
    if not path:
        raise _refused("no host list: not inside a PBS job, and no --hostfile")
    try:
        return list(dict.fromkeys(Path(path).read_text().split()))
    except OSError as error:
        raise _refused(f"cannot read {path}: {error.strerror}") from error


def launch(line: Line, root: Path) -> int:
    """Runs the ranks and returns the largest exit code of those that ended by themselves.

    A rank that fails ends all others, unless --no-abort-on-failure is given.
    """
    limits, nodes = Limits.read(root), hosts(line)
    num_nodes = max(len(nodes), limits.requested_nodes)
    num_ranks = line.number("num_ranks", 1)
    ppn = line.number("ppn", -(-num_ranks // num_nodes))
    if num_ranks > ppn * num_nodes:
        raise _refused(f"{num_ranks} ranks do not fit on {num_nodes} nodes with {ppn} each")
    depth = line.number("depth", 1)
    pmi = line.values.get("pmi", "cray")
    if pmi not in ("cray", "pmix"):
        raise _refused(f"invalid argument '{pmi}' for --pmi")
    if not line.command:
        raise _refused("no executable specified")
    apid, spool = str(uuid.uuid4()), spool_directory(root, "palsd.")
    given = dict(word.partition("=")[::2] for word in line.all_of("env"))
    own = {"PALS_APID": apid, "PALS_DEPTH": str(depth), "PALS_SPOOL_DIR": str(spool)}
    common = {**os.environ, **given, **own}
    ranks = places(limits.counts(num_ranks, ppn))

    def report(rank: int, code: int) -> None:
        how = f"exited with code {code}" if code > 0 else f"died from signal {-code}"
        sys.stderr.write(f"{nodes[ranks[rank].node]}: rank {rank} {how}\n")

    step = Step(
        command=limits.command(line.command),
        environments=[_environment(limits, common, place, pmi) for place in ranks],
        report=report,
        stop_on_failure="no-abort-on-failure" not in line.flags,
        label="label" in line.flags,
        directory=line.values.get("wdir", ""),
        keeper_pid=limits.keeper_pid,
    )
    return run_step(spool, step)


def _environment(limits: Limits, base: dict[str, str], place: Place, pmi: str) -> dict[str, str]:
    local_rank, local_size = str(place.local_rank), str(place.local_size)
    own = {
        "PALS_LOCAL_RANKID": local_rank,
        "PALS_LOCAL_SIZE": local_size,
        "PALS_NODEID": str(place.node),
        "PALS_RANKID": str(place.rank),
    }
    if pmi == "cray":
        own |= {"PMI_LOCAL_RANK": local_rank, "PMI_LOCAL_SIZE": local_size}
    else:  # PMIX_NAMESPACE is not set, since MPICH aborts if PMI_SIZE is set too
        own |= {"PALS_PMI": "pmix", "PMIX_RANK": str(place.rank)}
    return limits.environment(base) | own


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> int:
    """Runs the stand-in, which is installed as `mpiexec` and `mpirun`."""
    return run_launcher(argv, root, TABLE, launch)
