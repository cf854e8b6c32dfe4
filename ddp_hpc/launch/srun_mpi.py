"""Chooses the --mpi option of srun for a program that uses mpi4py, if nobody has chosen it.

With the wrong process manager interface, MPI_Init succeeds on each rank alone: N worlds of one rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ddp_hpc.request.program import program_of
from ddp_hpc.request.program_files import files_of
from ddp_hpc.schedulers.run_command import NoAnswerError, run

_LIMIT_S = 30.0
_VERSION = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
)
# Open MPI connects only through PMIx. Other MPIs understand PMI-2, and those of HPE Cray have an interface of
# their own, which is the default of srun where they are installed.
_OF_OPEN_MPI, _OF_OTHERS = ("pmix",), ("pmi2", "cray_shasta")
_DEFAULT = re.compile(r"^MpiDefault\s*=\s*(\S+)", re.MULTILINE)


def mpi_option(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Returns the option for a launch line of srun, such as --mpi=pmi2; empty if none is needed.

    None is needed if the user has chosen one, if no file of the program imports mpi4py, or if Slurm's default
    fits.
    """
    if environ.get("SLURM_MPI_TYPE") or any(word.partition("=")[0] == "--mpi" for word in words):
        return ""
    program = program_of(words)
    # The ranks of one agent, such as torchrun, would share the agent's connection to the process manager, and
    # MPI_Init would fail.
    if program is None or not program.python:
        return ""
    if "mpi4py" not in files_of(program, Path.cwd()).packages_elsewhere:
        return ""
    version = _answer((program.python, "-c", _VERSION), environ)
    if not version:
        return ""
    fitting = _OF_OPEN_MPI if "Open MPI" in version else _OF_OTHERS
    default = _DEFAULT.search(_answer(("scontrol", "show", "config"), environ))
    if default and default[1].startswith(fitting):
        return ""
    offered = set(_offered(_answer(("srun", "--mpi=list"), environ)))
    return next((f"--mpi={name}" for name in fitting if name in offered), "")


def _offered(text: str) -> Iterator[str]:
    """Yields the names in the output of `srun --mpi=list`, which has one line per plugin."""
    for line in text.splitlines():
        name = line.removeprefix("srun:").strip()
        if re.fullmatch(r"\w+", name):
            yield name


def _answer(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Returns what the command prints; Slurm's list is on standard error in some versions."""
    try:
        answer = run(argv, _LIMIT_S, environ)
    except NoAnswerError:
        return ""
    return answer.out + answer.err if answer.code == 0 else ""
