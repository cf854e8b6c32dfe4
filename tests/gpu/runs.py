"""Starts trainings for the GPU tests as forks of a process that has imported torch.

A new process needs up to ten seconds to import torch on a busy machine, and these tests start hundreds. The
process that forks never initializes CUDA.
"""

from __future__ import annotations

import atexit
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.training import runs
from tests.training.forked import Forks
from tests.training.runs import losses, succeeded


@cache
def _forks() -> Forks | None:
    """Returns None if CUDA cannot be initialized in forks on this machine."""
    forks = Forks()
    atexit.register(forks.close)
    return forks if _can_use_cuda(forks) else None


def _can_use_cuda(forks: Forks) -> bool:
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "script.py"
        script.write_text("import torch; torch.cuda.init()")
        return forks.script(script, cwd=Path(name), ranks=1).exit_code == 0


def train(
    *options: str,
    cwd: Path,
    ranks: int = 1,
    launcher: str = "torchrun",
    program: Sequence[str] = (),
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Like `train` in tests/training/runs.py, but one process is a fork where possible.

    Several ranks are started by torchrun, because a machine with GPUs may have no mpiexec.
    """
    forks = _forks() if ranks == 1 and not program else None
    if forks is None:
        words = list(program) or None
        return runs.train(
            *options, cwd=cwd, ranks=ranks, launcher=launcher if ranks > 1 else "mpiexec", program=words,
            timeout_s=timeout_s,
        )  # fmt: skip
    done = forks.script("ddp_hpc.train", *options, cwd=cwd, ranks=1, timeout_s=timeout_s)
    return subprocess.CompletedProcess(["train", *options], done.exit_code, done.stdout, done.stderr)


def trained_losses(*options: str, cwd: Path, timeout_s: float = 120.0) -> list[float]:
    """Like `trained_losses` in tests/training/runs.py."""
    name = f"{len(list(cwd.glob('*.jsonl')))}.jsonl"
    succeeded(train(*options, "--metrics", name, cwd=cwd, timeout_s=timeout_s))
    return losses(cwd / name)


@cache
def reference_losses(*options: str) -> list[float]:
    """The losses of a run of one process with these options, which many tests compare with theirs."""
    with tempfile.TemporaryDirectory() as name:
        return trained_losses(*options, cwd=Path(name), timeout_s=300.0)
