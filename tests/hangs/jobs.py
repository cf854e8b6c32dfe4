"""A job of Slurm, with stand-ins for its commands, whose supervisor starts a program with a real launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import Launch

PYTHON = Path(sys.executable)
TORCHRUN = ("torchrun_script.sh", "python")


@dataclass(frozen=True)
class Job:
    """A directory with the program `train.py`, in which jobs run."""

    launch: Launch
    folder: Path

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def stacks(self, rank: int, attempt: int = 1) -> str:
        return (self.run_dir / "stacks" / f"attempt-{attempt}" / f"rank-{rank}.txt").read_text()

    def tool(self, name: str, text: str = "") -> None:
        """Writes a command that the job finds first on its PATH."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def forbid_py_spy(self) -> None:
        """py-spy fails as in a container without the capability SYS_PTRACE."""
        self.tool("py-spy", "echo 'Error: Permission Denied' >&2; exit 1")

    def start(
        self,
        program: str,
        *options: str,
        idle_s: float = 6,
        num_ranks: int = 3,
        launcher: tuple[str, ...] = (),
        program_arguments: tuple[str, ...] = (),
        **environ: str,
    ) -> subprocess.Popen[str]:
        (self.folder / "train.py").write_text(program)
        for name in ("scontrol", "squeue", "sbatch", "scancel"):
            self.tool(name)
        (self.folder / "job.sh").write_text("#!/bin/bash\n")
        words = launcher or ("mpiexec", "-n", f"{num_ranks}", "python", "-m", "ddp_hpc.exec", "python")
        return self.launch.start(
            [
                *(PYTHON, "-m", "ddp_hpc.job", "--scheduler", "slurm", "--script", "job.sh"),
                *("--idle-timeout", f"{idle_s:g}", *options, "--", *words, "train.py", *program_arguments),
            ],
            env={
                "PATH": f"{self.folder / 'bin'}:{PYTHON.parent}:{os.environ['PATH']}",
                "DDP_HPC_RUN_DIR": str(self.run_dir),
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_END_TIME": str(int(time.time()) + 3600),
                "OMP_NUM_THREADS": "1",
                **environ,
            },
            cwd=self.folder,
        )
