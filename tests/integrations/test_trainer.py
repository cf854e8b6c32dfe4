"""`python -m ddp_hpc.train` is stopped by a signal and resumed under each launcher, like other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.mpi.conftest import OPENMPI_SETTINGS

OPTIONS = ["--model", "linear", "--src-shape", "20", "--tgt-shape", "1", "--num-samples", "320"]
OPTIONS += ["--epochs", "2", "--batch-size", "16", "--log-every", "1", "--metrics-hook", "stopper:after_step"]
STOPPER = """
import os, signal

def after_step(record):
    if record["step"] == int(os.environ.get("SIGNAL_AT", 0)):
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["mpiexec", "openmpi", "torchrun"])
def test_a_stopped_training_is_resumed_with_the_same_losses(
    launcher: str, launch: Launch, mpiexec: Path, openmpi_python: Path, openmpi_mpiexec: Path, tmp_path: Path
) -> None:
    (tmp_path / "stopper.py").write_text(STOPPER)
    argv: list[str | Path] = {
        "mpiexec": [mpiexec, "-n", "2", "python"],
        "openmpi": [openmpi_mpiexec, "-n", "2", openmpi_python],
        "torchrun": ["torchrun", "--nproc-per-node=2"],
    }[launcher]
    argv += ["-m", "ddp_hpc.train", *OPTIONS]

    def losses(name: str, *options: str, signal_at: int = 0, exit_code: int = 0) -> list[float]:
        env = {"SIGNAL_AT": str(signal_at), "OMP_NUM_THREADS": "1", **OPENMPI_SETTINGS}
        done = launch([*argv, *options, "--metrics", name], env=env, cwd=tmp_path, timeout_s=200.0)
        assert done.exit_code == exit_code, done.stdout + done.stderr
        return [json.loads(line)["loss"] for line in (tmp_path / name).read_text().splitlines()]

    whole = losses("whole.jsonl")
    assert len(whole) == 20
    saved = ["--snapshot-dir", "snapshots"]
    stopped = losses("run.jsonl", *saved, signal_at=7, exit_code=0 if launcher == "torchrun" else 75)
    assert 7 <= len(stopped) < 20
    assert losses("run.jsonl", *saved) == whole
