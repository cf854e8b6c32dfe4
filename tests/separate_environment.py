"""A virtual environment with ddp-hpc that is not active, as after `pipx install`."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.conftest import PROJECT

# Not the usual first line, which cannot name a path with spaces.
_DDP_HPC = """#!/bin/sh
exec '{python}' -c 'from ddp_hpc.cli import main; main()' "$@"
"""


def make_environment(folder: Path) -> Path:
    """Creates an environment that uses the packages of this one; returns the path of its ddp-hpc."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(f"{PROJECT}\n{sysconfig.get_paths()['purelib']}\n")
    program = folder / "bin" / "ddp-hpc"
    program.write_text(_DDP_HPC.format(python=folder / "bin" / "python"))
    program.chmod(0o755)
    return program
