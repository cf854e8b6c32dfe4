"""Installs the commands of the stand-ins, and a home directory whose login shell finds them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_hpc.base.process_control import PACKAGES
from ddp_hpc.rehearse import start_stand_in

# The shell is bash, since dash would drop the functions that a login shell exports.
_COMMAND = """#!/bin/bash
exec {words} "$@"
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


def command(path: Path, module: str, root: Path) -> Path:
    """Writes a command that runs `main` of the module for the machine in the directory `root`."""
    code = start_stand_in.CODE.format(what="command")
    words = (sys.executable, *start_stand_in.PYTHON_OPTIONS, code, str(PACKAGES), module, str(root))
    return program(path, _COMMAND.format(words=shlex.join(words)))


def install_mpiexec(root: Path, mpi_bin: Path, kind: str) -> None:
    """Installs `mpiexec` and `mpirun` of one kind: pals, hydra or openmpi."""
    for name in ("mpiexec", "mpirun"):
        command(mpi_bin / name, f"ddp_hpc.rehearse.launchers.{kind}", root)


# The site's modules, conda environments and setup files do not exist on this machine, so these functions only
# print a message.
_PROFILE = """export PATH={path}
export PYTHONPATH={packages}${{PYTHONPATH:+:$PYTHONPATH}} VIRTUAL_ENV={prefix}
# So that job scripts do not activate a virtual environment, which would hide the simulated launchers.
export CONDA_DEFAULT_ENV=rehearsal
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
    """Writes `.bash_profile`, which sets PATH and PYTHONPATH and replaces `module`, `conda` and `source`."""
    values = {
        "path": ":".join(str(directory) for directory in path),
        "packages": str(PACKAGES),
        "prefix": sys.prefix,
    }
    quoted = {name: shlex.quote(word) for name, word in values.items()}
    home.mkdir(parents=True, exist_ok=True)
    (home / ".bash_profile").write_text(_PROFILE.format(**quoted))
