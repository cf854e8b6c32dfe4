"""The mpiexec that a job script would take, and what it understands, as templates/job.sh.j2 finds it out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ddp_hpc.errors import RequestError
from ddp_hpc.local_mpi import ask_version, is_open_mpi

_ASK_LIMIT_S = 30.0


def find_mpiexec(environ: Mapping[str, str]) -> str:
    """DDP_HPC_MPIEXEC, else the machine's mpiexec, else the one of an active Python environment.

    Ranks that an environment's own (of the mpich wheel) starts do not find each other through the machine's
    MPI. PBS's own mpiexec is none: it fails --version.

    Raises:
        RequestError: there is none.
    """
    wanted = environ.get("DDP_HPC_MPIEXEC", "")
    path = environ.get("PATH", os.defpath)
    if wanted:
        if found := shutil.which(wanted, path=path):
            return found
        raise RequestError(f"DDP_HPC_MPIEXEC={wanted} is no program that can be run; name an mpiexec")
    environments = [environ[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(name)]
    spare = ""
    for candidate in _all_on(path):
        if not version_of(candidate, environ):
            continue
        if not any(Path(folder) in Path(candidate).parents for folder in environments):
            return candidate
        spare = spare or candidate
    if not spare:
        raise RequestError(
            "mpiexec was not found as an MPI launcher; load the MPI module, install the PyPI package mpich, "
            "or choose another one with --launcher"
        )
    return spare


def version_of(mpiexec: str, environ: Mapping[str, str]) -> str:
    """What `mpiexec --version` says; empty where it fails."""
    code, said = ask_version(mpiexec, _ASK_LIMIT_S, environ)
    return "" if code else said or "no words"


def per_node_words(
    version: str, ranks: int, handed_on: Sequence[str], *, may_oversubscribe: bool
) -> list[str]:
    """So many ranks a node, in the spelling of an mpiexec that says this of itself.

    `handed_on` are the variables that Open MPI has to be told to take to other nodes.
    """
    if is_open_mpi(version):
        more = ":OVERSUBSCRIBE" if may_oversubscribe else ""
        named = [word for name in handed_on for word in ("-x", name)]
        return ["--map-by", f"ppr:{ranks}:node{more}", "--bind-to", "none", *named]
    if any(word in version for word in ("HYDRA", "Hydra", "Intel(R) MPI")):
        return ["-ppn", str(ranks)]
    return ["--ppn", str(ranks)]


def _all_on(path: str) -> Iterator[str]:
    for folder in path.split(os.pathsep):
        if found := shutil.which("mpiexec", path=folder or os.curdir):
            yield str(Path(found).absolute())
