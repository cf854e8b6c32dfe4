"""Selects mpiexec and its options."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.base.errors import RequestError
from ddp_hpc.discovery.local_mpi import (
    ask_version,
    bundled_mpiexec,
    is_hydra,
    is_open_mpi,
    is_pbs_mpiexec,
    mpiexecs_on,
)

_ASK_LIMIT_S = 30.0


def find_mpiexec(environ: Mapping[str, str], *, has_queue: bool) -> tuple[str, str]:
    """Returns the path of an mpiexec, and its version text.

    The first choice is the mpiexec that DDP_HPC_MPIEXEC names. On a machine without a queue, the next one is
    that of the mpich wheel in this Python environment, because mpi4py works with it. Otherwise, an mpiexec of
    the machine comes before one in the active Python environment: the ranks that the wheel's mpiexec starts
    cannot connect through the machine's MPI. PBS's own mpiexec is not an MPI launcher.

    Raises:
        RequestError: no mpiexec was found, or DDP_HPC_MPIEXEC is not an mpiexec.
    """
    wanted = environ.get("DDP_HPC_MPIEXEC", "")
    path = environ.get("PATH", os.defpath)
    if wanted:
        if program := shutil.which(wanted, path=path):
            code, version = ask_version(program, _ASK_LIMIT_S, environ)
            if is_pbs_mpiexec(version):
                raise RequestError(
                    f"DDP_HPC_MPIEXEC={wanted} is PBS's own mpiexec, not an MPI launcher. Use another "
                    "mpiexec."
                )
            return program, "" if code else version
        raise RequestError(
            f"DDP_HPC_MPIEXEC={wanted} is not an executable program. Set the variable to the "
            "path of an mpiexec."
        )
    if not has_queue and (own := bundled_mpiexec()):
        return str(own), _version_of(str(own), environ)
    environments = [environ[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(name)]
    spare: tuple[str, str] | None = None
    for candidate in map(str, mpiexecs_on(path)):
        version = _version_of(candidate, environ)
        if not version:
            continue
        if not any(Path(prefix) in Path(candidate).parents for prefix in environments):
            return candidate, version
        spare = spare or (candidate, version)
    if spare is None:
        raise RequestError(
            "no mpiexec of an MPI library found on the PATH. Load the MPI module, install the PyPI "
            "package mpich, or choose another launcher with --launcher."
        )
    return spare


def _version_of(mpiexec: str, environ: Mapping[str, str]) -> str:
    """Returns the output of `mpiexec --version`; empty if it fails or the program is PBS's own mpiexec."""
    code, output = ask_version(mpiexec, _ASK_LIMIT_S, environ)
    return "" if code or is_pbs_mpiexec(output) else output or "no output"


def per_node_words(
    version: str, ranks: int | str, exported: Sequence[str], *, may_oversubscribe: bool
) -> list[str]:
    """Returns the options for `ranks` ranks per node that an mpiexec of this version understands.

    `exported` are the variables that Open MPI must export to other nodes.
    """
    if is_open_mpi(version):
        sharing = ":OVERSUBSCRIBE" if may_oversubscribe else ""
        named = [word for name in exported for word in ("-x", name)]
        return ["--map-by", f"ppr:{ranks}:node{sharing}", "--bind-to", "none", *named]
    if is_hydra(version):
        return ["-ppn", str(ranks)]
    return ["--ppn", str(ranks)]
