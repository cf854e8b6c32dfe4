"""The folder in which stand-ins live: their commands, and a user's home whose login shell knows them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_hpc.rehearse.processes import PACKAGES

# A command runs by this Python, without its packages, whatever PATH and PYTHONPATH the job has.
# bash, as dash would drop the functions that a login shell exports.
_COMMAND = """#!/bin/bash
export {variable}={root}
code='import sys; sys.path.insert(0, sys.argv.pop(1)); from {module} import main; main()'
exec {python} -I -S -c "$code" {packages} "$@"
"""

# PBS brings an mpiexec that is no MPI launcher, though it answers --version; OpenPBS's src/cmds/mpiexec.in.
PBS_MPIEXEC = """#!/bin/sh
if [ $# -eq 1 ] && [ "$1" = "--version" ]; then
  echo pbs_version = 23.06.06
  exit 0
fi
echo "mpiexec:  unexpected error - no non-PBS mpiexec in PBS_O_PATH" >&2
exit 1
"""


def program(path: Path, text: str) -> Path:
    """An executable file of that text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def command(path: Path, module: str, variable: str, root: Path) -> Path:
    """A command that runs `main` of the module, which finds its folder by that variable."""
    words = {"root": root, "python": sys.executable, "packages": PACKAGES}
    quoted = {name: shlex.quote(str(word)) for name, word in words.items()}
    return program(path, _COMMAND.format(module=module, variable=variable, **quoted))


def install_pbs(root: Path, pbs_bin: Path, pals_bin: Path) -> None:
    """The commands of PBS and the mpiexec of PALS, for the machine below `root`."""
    from ddp_hpc.rehearse.launchers import pals
    from ddp_hpc.rehearse.pbs import server

    for name in ("qsub", "qstat", "qdel", "qsig", "qhold", "qrerun"):
        command(pbs_bin / name, f"ddp_hpc.rehearse.pbs.{name}", server.FOLDER_VARIABLE, root)
    command(pals_bin / "mpiexec", "ddp_hpc.rehearse.launchers.pals", pals.FOLDER_VARIABLE, root)
    program(pbs_bin / "mpiexec", PBS_MPIEXEC)


def install_slurm(root: Path, slurm_bin: Path) -> None:
    """The commands of Slurm, for the machine below `root`."""
    from ddp_hpc.rehearse.slurm import controller

    for name in ("sbatch", "srun", "scontrol", "scancel", "squeue"):
        command(slurm_bin / name, f"ddp_hpc.rehearse.slurm.{name}", controller.FOLDER_VARIABLE, root)


def install_mpiexec(root: Path, mpi_bin: Path, kind: str) -> None:
    """`mpiexec` and `mpirun` of that kind: pals, hydra or openmpi."""
    variables = {"pals": "PALS", "hydra": "HYDRA", "openmpi": "OPENMPI"}
    for name in ("mpiexec", "mpirun"):
        variable = f"{variables[kind]}_STAND_IN_HOME"
        command(mpi_bin / name, f"ddp_hpc.rehearse.launchers.{kind}", variable, root)


# What a site's modules and setup files would do cannot be done here: it is said, and passed over.
_PROFILE = """export PATH={path}
export PYTHONPATH={packages}${{PYTHONPATH:+:$PYTHONPATH}} VIRTUAL_ENV={prefix}
module() {{ echo "rehearse: module $* (nothing is loaded)" >&2; }}
ml() {{ module "$@"; }}
conda() {{ echo "rehearse: conda $* (the Python of ddp-hpc stays)" >&2; }}
source() {{
  if [[ $# -gt 0 && ! -e $1 ]]; then
    echo "rehearse: source $1: the file is not here and is passed over" >&2
  else
    builtin source "$@"
  fi
}}
.() {{ source "$@"; }}
export -f module ml conda source .
"""


def write_profile(home: Path, path: Sequence[Path | str]) -> None:
    """The user's `.bash_profile`: PATH, this Python's packages, stand-ins for the site's software."""
    words = {
        "path": ":".join(str(folder) for folder in path),
        "packages": str(PACKAGES),
        "prefix": sys.prefix,
    }
    quoted = {name: shlex.quote(word) for name, word in words.items()}
    home.mkdir(parents=True, exist_ok=True)
    (home / ".bash_profile").write_text(_PROFILE.format(**quoted))
