"""`mpiexec` with PALS's options and variables.

With two hosts in the node file, rank r is on host r // ppn as far as its variables
tell. PMI_RANK, PMI_SIZE and PMI_FD stay, also with --pmi=pmix: without them MPI could
not start.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ddp_hpc.rehearse.launchers import options
from ddp_hpc.rehearse.launchers.limits import Limits, read_limits
from ddp_hpc.rehearse.launchers.options import Line, RefusedError, Table, spellings
from ddp_hpc.rehearse.launchers.ranks import Place, Step, places, run_step, spool_folder

FOLDER_VARIABLE = "PALS_STAND_IN_HOME"  # set by the installed command
VERSION = "mpiexec version 1.3.2 revision 0"

# Every option of PALS that the stand-in knows, by its spellings; the rest is refused. Bindings are read and
# not applied.
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
)
_LAST_LINE = "\nTry 'mpiexec --help' for more information."


def _refused(message: str) -> RefusedError:
    return RefusedError(f"mpiexec: {message}{_LAST_LINE}")


def read_line(argv: Sequence[str]) -> Line:
    """The command line.

    Raises:
        RefusedError: an option that PALS does not have, or one without its value.
    """
    try:
        return options.read_line(argv, TABLE)
    except options.UnknownOptionError as error:
        raise _refused(f"unrecognized option '{error}'") from None
    except options.MissingValueError as error:
        raise _refused(f"option '{error}' requires an argument") from None


def hosts(line: Line) -> list[str]:
    """The hosts of --hosts, the host file or the job's node file, each once, in order.

    Raises:
        RefusedError: outside a job, or without such a file.
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
    """Runs the ranks; the largest exit code of those that ended by themselves.

    One rank's non-zero end ends all others, unless --no-abort-on-failure.
    """
    limits, nodes = read_limits(root), hosts(line)
    num_nodes = max(len(nodes), limits.asked_nodes)
    num_ranks = line.number("num_ranks", 1, _bad_number)
    ppn = line.number("ppn", -(-num_ranks // num_nodes), _bad_number)
    if num_ranks > ppn * num_nodes:
        raise _refused(f"{num_ranks} ranks do not fit on {num_nodes} nodes with {ppn} each")
    depth = line.number("depth", 1, _bad_number)
    pmi = line.values.get("pmi", "cray")
    if pmi not in ("cray", "pmix"):
        raise _refused(f"invalid argument '{pmi}' for --pmi")
    if not line.command:
        raise _refused("no executable specified")
    apid, spool = str(uuid.uuid4()), spool_folder(root, "palsd.")
    given = dict(word.partition("=")[::2] for word in line.all_of("env"))
    base = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE} | given
    of_all = {"PALS_APID": apid, "PALS_DEPTH": str(depth), "PALS_SPOOL_DIR": str(spool)}
    ranks = places(limits.counts(num_ranks, ppn))

    def say(rank: int, code: int) -> None:
        how = f"exited with code {code}" if code > 0 else f"died from signal {-code}"
        sys.stderr.write(f"{nodes[ranks[rank].node]}: rank {rank} {how}\n")

    step = Step(
        command=limits.command(line.command),
        environments=[_environment(limits, {**base, **of_all}, place, pmi) for place in ranks],
        say=say,
        stop_on_failure="no-abort-on-failure" not in line.flags,
        label="label" in line.flags,
        folder=line.values.get("wdir", ""),
        keeper_pid=limits.keeper_pid,
    )
    return run_step(spool, step)


def _environment(limits: Limits, base: dict[str, str], place: Place, pmi: str) -> dict[str, str]:
    local_rank, local_size = str(place.local_rank), str(place.local_size)
    of_rank = {
        "PALS_LOCAL_RANKID": local_rank,
        "PALS_LOCAL_SIZE": local_size,
        "PALS_NODEID": str(place.node),
        "PALS_RANKID": str(place.rank),
    }
    if pmi == "cray":
        of_rank |= {"PMI_LOCAL_RANK": local_rank, "PMI_LOCAL_SIZE": local_size}
    else:  # without PMIX_NAMESPACE: MPICH aborts where it finds that beside PMI_SIZE
        of_rank |= {"PALS_PMI": "pmix", "PMIX_RANK": str(place.rank)}
    return limits.environment(base) | of_rank


def _bad_number(text: str, name: str) -> RefusedError:
    return _refused(f"invalid argument '{text}' for {name}")


def main() -> NoReturn:
    """The installed command."""
    options.run(read_line, launch, VERSION, FOLDER_VARIABLE)
