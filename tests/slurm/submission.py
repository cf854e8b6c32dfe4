"""The options of a small job on the test cluster, and the command that submits it."""

from __future__ import annotations

import sys
from pathlib import Path

REQUEST = ["--profile", "generic_slurm", "--name", "ddp", "--walltime", "00:05:00"]
SUBMIT = [str(Path(sys.executable).parent / "python"), "-m", "ddp_hpc", "submit", *REQUEST]
