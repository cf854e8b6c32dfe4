"""Runs the examples of docs/examples as ranks, with a deadline."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ddp_hpc.discovery.launcher_environment import ADDED_BY_EXEC
from tests.conftest import PROJECT, Ended, Launch
from tests.mpi.conftest import OPENMPI_SETTINGS
from tests.training.forked import Forks

EXAMPLES = PROJECT / "docs" / "examples"
NUM_STEPS = 30
STEPS = "from tests.integrations import steps"
RunExample = Callable[..., Ended]

# The name of the package that each example needs.
NEEDS = {
    "deadline_loop.py": "torch",
    "accelerate_loop.py": "accelerate",
    "lightning_trainer.py": "lightning",
    "hf_trainer.py": "transformers",
    "deepspeed_loop.py": "deepspeed",
    "library_loop.py": "torch",
}


def weights(ended: Ended) -> str:
    """Returns the weights that rank 0 printed at the end of the training."""
    found = re.findall(r"^weights (\w+)$", ended.stdout, re.MULTILINE)
    assert len(found) == 1, ended.stdout + ended.stderr
    return str(found[0])


def steps(ended: Ended) -> list[int]:
    """Returns the steps that were trained."""
    return [int(step) for step in re.findall(r"^trained step (\d+)$", ended.stdout, re.MULTILINE)]


def state(directory: Path) -> list[str]:
    """Returns the words of the run's state: state, step, reason."""
    return (directory / "state").read_text().split(maxsplit=2)


@pytest.fixture
def run_example(
    launch: Launch,
    mpiexec: Path,
    openmpi_mpiexec: Path,
    openmpi_python: Path,
    framework_forks: Forks,
    tmp_path: Path,
) -> RunExample:
    """Returns a function that runs an example with a deadline in `left_s` seconds, on two ranks.

    With `signal_at`, rank 1 receives SIGTERM in that step. A step takes at least `step_s` seconds. The
    checkpoints are in tmp_path/checkpoints. The launcher `forks` starts ranks for which torch is imported.
    """

    def run(
        name: str,
        *,
        left_s: float = 3600.0,
        launcher: str = "forks",
        env: Mapping[str, str] | None = None,
        num_steps: int = NUM_STEPS,
        checkpoints: str = "checkpoints",
        signal_at: int = 0,
        step_s: float = 0.005,
    ) -> Ended:
        program = tmp_path / name
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        text = text.replace("STEP_S = 0.3", f"STEP_S = {step_s}").replace("sleep(0.3)", f"sleep({step_s})")
        program.write_text(text.replace("import time", STEPS).replace("time.sleep", "steps.sleep"))
        words: list[str | Path] = [openmpi_mpiexec if launcher == "openmpi" else mpiexec, "-n", "2"]
        if launcher == "torchrun":
            words = ["torchrun", "--nproc-per-node=2"]
        elif "ddp_hpc.distributed" in text:  # it detects the ranks itself, with MPI
            words += [openmpi_python if launcher == "openmpi" else "python"]
        else:
            words += ["python", "-m", "ddp_hpc.exec", "python"]
        variables = {
            "DDP_HPC_DEADLINE": str(int(time.time() + left_s)),
            "DDP_HPC_RUN_DIR": str(tmp_path),
            "DDP_HPC_PROGRESS_FILE": str(tmp_path / "progress"),
            "OMP_NUM_THREADS": "1",
            "SIGNAL_AT": str(signal_at),
            **OPENMPI_SETTINGS,
            **(env or {}),
        }
        if launcher == "forks":  # with the variables of `ddp-hpc exec`
            variables |= {"TORCHELASTIC_RUN_ID": "forks", ADDED_BY_EXEC: "TORCHELASTIC_RUN_ID"}
            return framework_forks.script(
                program, str(num_steps), checkpoints, env=variables, cwd=tmp_path, timeout_s=120.0
            )
        argv = [*words, program, str(num_steps), checkpoints]
        return launch(argv, env=variables, cwd=tmp_path, timeout_s=120.0)

    return run
