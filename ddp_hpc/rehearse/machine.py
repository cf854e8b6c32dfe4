"""Install the commands of the stand-ins, and a home directory whose login shell finds them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_hpc.rehearse.processes import PACKAGES

# The commands run with this Python without its site-packages, so PATH and PYTHONPATH of the job do not
# matter. The shell is bash, since dash would drop the functions that a login shell exports.
_COMMAND = """#!/bin/bash
export {variable}={root}
code='import sys; sys.path.insert(0, sys.argv.pop(1)); from {module} import main; main()'
exec {python} -I -S -c "$code" {packages} "$@"
"""

# The mpiexec of PBS, which is not an MPI launcher although it accepts --version (OpenPBS's
# src/cmds/mpiexec.in).
PBS_MPIEXEC = """#!/bin/sh
if [ $# -eq 1 ] && [ "$1" = "--version" ]; then
  echo pbs_version = 23.06.06
  exit 0
fi
echo "mpiexec:  unexpected error - no non-PBS mpiexec in PBS_O_PATH" >&2
exit 1
"""


def program(path: Path, text: str) -> Path:
    """Writes an executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def command(path: Path, module: str, variable: str, root: Path) -> Path:
    """Writes a command that runs `main` of the module; its `variable` holds the directory of the stand-in."""
    values = {"root": root, "python": sys.executable, "packages": PACKAGES}
    quoted = {name: shlex.quote(str(value)) for name, value in values.items()}
    return program(path, _COMMAND.format(module=module, variable=variable, **quoted))


def install_pbs(root: Path, pbs_bin: Path, pals_bin: Path) -> None:
    """Installs the commands of PBS and the mpiexec of PALS for the machine in `root`."""
    from ddp_hpc.rehearse.launchers import pals
    from ddp_hpc.rehearse.pbs import server

    for name in ("qsub", "qstat", "qdel", "qsig", "qhold", "qrerun"):
        command(pbs_bin / name, f"ddp_hpc.rehearse.pbs.{name}", server.DIRECTORY_VARIABLE, root)
    command(pals_bin / "mpiexec", "ddp_hpc.rehearse.launchers.pals", pals.DIRECTORY_VARIABLE, root)
    program(pbs_bin / "mpiexec", PBS_MPIEXEC)


def install_slurm(root: Path, slurm_bin: Path) -> None:
    """Installs the commands of Slurm for the machine in `root`."""
    from ddp_hpc.rehearse.slurm import controller

    for name in ("sbatch", "srun", "scontrol", "scancel", "squeue"):
        command(slurm_bin / name, f"ddp_hpc.rehearse.slurm.{name}", controller.DIRECTORY_VARIABLE, root)


def install_mpiexec(root: Path, mpi_bin: Path, kind: str) -> None:
    """Installs `mpiexec` and `mpirun` of one kind: pals, hydra or openmpi."""
    variables = {"pals": "PALS", "hydra": "HYDRA", "openmpi": "OPENMPI"}
    for name in ("mpiexec", "mpirun"):
        variable = f"{variables[kind]}_STAND_IN_HOME"
        command(mpi_bin / name, f"ddp_hpc.rehearse.launchers.{kind}", variable, root)


# Modules, conda environments and setup files of a site do not exist here, so a message replaces them.
_PROFILE = """export PATH={path}
export PYTHONPATH={packages}${{PYTHONPATH:+:$PYTHONPATH}} VIRTUAL_ENV={prefix}
module() {{ echo "rehearse: module $* (nothing is loaded)" >&2; }}
ml() {{ module "$@"; }}
conda() {{ echo "rehearse: conda $* (the Python of ddp-hpc is used)" >&2; }}
source() {{
  if [[ $# -gt 0 && ! -e $1 ]]; then
    echo "rehearse: source $1: skipped, the file does not exist on this machine" >&2
  else
    builtin source "$@"
  fi
}}
.() {{ source "$@"; }}
export -f module ml conda source .
"""


def write_profile(home: Path, path: Sequence[Path | str]) -> None:
    """Writes `.bash_profile` with PATH, this Python's packages, and stand-ins for the site's software."""
    values = {
        "path": ":".join(str(directory) for directory in path),
        "packages": str(PACKAGES),
        "prefix": sys.prefix,
    }
    quoted = {name: shlex.quote(word) for name, word in values.items()}
    home.mkdir(parents=True, exist_ok=True)
    (home / ".bash_profile").write_text(_PROFILE.format(**quoted))
