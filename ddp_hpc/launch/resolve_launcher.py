"""Completes the launch line of a job script: chooses mpiexec, its options, and the torchrun script."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.base.assets import asset_directory
from ddp_hpc.base.errors import RequestError
from ddp_hpc.discovery.local_mpi import library_of
from ddp_hpc.launch.find_mpiexec import find_mpiexec, per_node_words
from ddp_hpc.launch.srun_mpi import mpi_option
from ddp_hpc.render.launch_lines import STEP_SCRIPT
from ddp_hpc.request.mpi_program import connects_only_with_mpi

_EXEC = ("ddp-hpc", "exec", "--")
_PER_NODE = ("--ppn", "-ppn")
# Open MPI passes only named variables to other nodes.
_ALWAYS_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")


def resolve(
    argv: Sequence[str], environ: Mapping[str, str], exported: Sequence[str], *, has_queue: bool
) -> tuple[list[str], dict[str, str]]:
    """Returns the command to execute and the variables that it needs in addition.

    A leading `mpiexec` becomes the path of the machine's mpiexec, and --ppn becomes the corresponding option
    of this mpiexec. srun gets the --mpi option that a program with mpi4py needs. `torchrun_script.sh` and the
    `ddp-hpc` of `ddp-hpc exec --` become paths. `exported` are the variables that ranks need on other nodes.
    Without a queue (`has_queue`), which would limit the number of ranks, several ranks may share a core.

    Raises:
        RequestError: no MPI launcher or no ddp-hpc was found, or torchrun cannot start the program.
    """
    words: list[str] = list(argv)
    added: dict[str, str] = {}
    if STEP_SCRIPT in words:
        _check_mpi_under_torchrun(words[words.index(STEP_SCRIPT) + 1 :])
    if words[0] == "mpiexec":
        words, added = _with_mpiexec(words, environ, exported, has_queue=has_queue)
    if words[0] == "srun" and (option := mpi_option(words, environ)):
        words.insert(1, option)
    if STEP_SCRIPT in words:
        words[words.index(STEP_SCRIPT)] = _find_step_script(environ)
    if _EXEC in zip(words, words[1:], words[2:], strict=False):
        words[words.index("ddp-hpc")] = _find_ddp_hpc(environ)
    return words, added


def _with_mpiexec(
    words: list[str], environ: Mapping[str, str], exported: Sequence[str], *, has_queue: bool
) -> tuple[list[str], dict[str, str]]:
    mpiexec, version = find_mpiexec(environ, has_queue=has_queue)
    added = {} if has_queue else library_of(Path(mpiexec), environ)
    words = [mpiexec, *words[1:]]
    index = next((index for index, word in enumerate(words) if word in _PER_NODE), None)
    if index is not None:
        there = {**environ, **added}
        names = [name for name in dict.fromkeys([*_ALWAYS_EXPORTED, *added, *exported]) if name in there]
        words[index : index + 2] = per_node_words(
            version, words[index + 1], names, may_oversubscribe=not has_queue
        )
    return words, added


def _check_mpi_under_torchrun(command: Sequence[str]) -> None:
    """Raises RequestError if the ranks would be MPI worlds of one rank each, which MPI does not report."""
    if connects_only_with_mpi(command, Path.cwd()):
        raise RequestError(
            "the program uses mpi4py and not torch.distributed, but MPI does not know the ranks that "
            "torchrun starts, so each of them would have its own MPI_COMM_WORLD; use another --launcher"
        )


def _find_step_script(environ: Mapping[str, str]) -> str:
    on_path = shutil.which(STEP_SCRIPT, path=environ.get("PATH", os.defpath))
    beside = (Path(STEP_SCRIPT).absolute(), Path("jobs", STEP_SCRIPT).absolute())
    own = next((str(path) for path in beside if os.access(path, os.X_OK)), None)
    return on_path or own or str(asset_directory("jobs") / STEP_SCRIPT)


def _find_ddp_hpc(environ: Mapping[str, str]) -> str:
    """Returns the `ddp-hpc` of this Python environment, otherwise the one on the PATH."""
    beside = str(Path(sys.executable).parent / "ddp-hpc")
    program = shutil.which(beside) or shutil.which("ddp-hpc", path=environ.get("PATH", os.defpath))
    if program is None:
        raise RequestError(
            "ddp-hpc, which sets RANK and similar variables for the program, is neither on the PATH nor "
            f"next to {sys.executable}. Install it with pip, or use --env-style none."
        )
    return program
