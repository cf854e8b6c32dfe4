"""Installs the commands of the stand-ins, and a home directory whose login shell finds them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_hpc.base.process_control import PACKAGES
from ddp_hpc.rehearse import start_stand_in
from ddp_hpc.rehearse.launchers.failure import DOWN

# The shell is bash, since dash would drop the functions that a login shell exports.
_COMMAND = """#!/bin/bash
exec {words} "$@"
"""


def program(path: Path, text: str) -> Path:
    """Writes an executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def command(path: Path, module: str, root: Path, *arguments: str) -> Path:
    """Writes a command that runs `main` of the module for the machine in the directory `root`.

    The user's arguments follow `arguments`.
    """
    code = start_stand_in.CODE.format(what="command")
    words = (
        sys.executable,
        *start_stand_in.PYTHON_OPTIONS,
        code,
        str(PACKAGES),
        module,
        str(root),
        *arguments,
    )
    return program(path, _COMMAND.format(words=shlex.join(words)))


def install_mpiexec(root: Path, mpi_bin: Path, kind: str) -> None:
    """Installs `mpiexec` and `mpirun` of one kind: pals, hydra or openmpi."""
    for name in ("mpiexec", "mpirun"):
        command(mpi_bin / name, "ddp_hpc.rehearse.launchers.mpiexec", root, kind)


# The site's modules, conda environments and setup files do not exist on this machine, so these functions only
# print a message.
_PROFILE = """export PATH={path}
export DDP_HPC_DOWN_NODES={down} PYTHONPATH={packages}${{PYTHONPATH:+:$PYTHONPATH}} VIRTUAL_ENV={prefix}
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
        "down": str(home.parent / DOWN),
        "path": ":".join(str(directory) for directory in path),
        "packages": str(PACKAGES),
        "prefix": sys.prefix,
    }
    quoted = {name: shlex.quote(word) for name, word in values.items()}
    home.mkdir(parents=True, exist_ok=True)
    (home / ".bash_profile").write_text(_PROFILE.format(**quoted))
