"""Programs with other libraries run past several walltimes on two nodes of a real Slurm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import skip_without
from tests.integrations.conftest import EXAMPLES, NEEDS

from .cluster import Cluster
from .nodes import wait_for
from .submission import SUBMIT
from .test_queue import status
from .test_training import BIN, ENVIRONMENT

pytestmark = [pytest.mark.slurm, pytest.mark.soak]

NUM_STEPS = 240
# Importing Lightning takes up to 15 s on a busy machine, and the examples stop 10 s before the end.
WALLTIME_S = 40
BY_SIGNAL = ["--requeue", "on-signal", "--signal", "TERM@10", "--progress", "checkpoints"]


ARGUMENTS = (str(NUM_STEPS), "checkpoints")


def run_to_the_end(
    cluster: Cluster, name: str, folder: Path, *options: str, arguments: Sequence[str] = ARGUMENTS
) -> tuple[str, str]:
    """Returns the job ID and the whole log of a run of the example."""
    folder.mkdir()
    argv = [*SUBMIT, "--nodes", "2", "--ranks-per-node", "1", *options]
    argv += ["--", "python", str(EXAMPLES / name), *arguments]
    queued = cluster.run(argv, env=ENVIRONMENT, cwd=folder)
    assert queued.returncode == 0, queued.stderr
    job = queued.stdout.strip()
    state = folder / "runs" / "ddp" / "state"
    over = re.compile("(done|failed) ")
    wait_for("the end of the run", lambda: state.exists() and over.match(state.read_text()) is not None, 600)
    return job, (folder / f"ddp-{job}.out").read_text()


# The library also stops before KillWait begins, which can be longer than this walltime.
NAMES = [*(name for name in NEEDS if name != "library_loop.py"), "plain_ddp.py"]


@pytest.mark.parametrize("launcher", ["srun", "mpiexec", "torchrun"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_several_walltimes_has_the_weights_of_an_uninterrupted_one(
    cluster: Cluster, tmp_path: Path, name: str, launcher: str
) -> None:
    skip_without(NEEDS.get(name, "torch"))
    # Slurm's walltimes are whole minutes. It is not asked for the end if the user has set it.
    walltime = f"export DDP_HPC_DEADLINE=$(($(date +%s) + {WALLTIME_S}))"
    options = BY_SIGNAL if name == "plain_ddp.py" else []
    common = ["--launcher", launcher]
    if name == "deepspeed_loop.py":
        # It compiles an extension, which takes longer than a walltime and more memory than a job has here.
        extensions = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
        alone = [
            str(BIN / "python"),
            "-m",
            "ddp_hpc.exec",
            str(BIN / "python"),
            str(EXAMPLES / name),
            "1",
            "x",
        ]
        built = cluster.run(alone, env={**ENVIRONMENT, **extensions}, cwd=tmp_path, timeout=300)
        assert built.returncode == 0, built.stderr
        common += [f"--env={one}={value}" for one, value in extensions.items()]
    _, whole = run_to_the_end(cluster, name, tmp_path / "uninterrupted", *common)
    options += ["--setup", walltime, *common]
    job, log = run_to_the_end(cluster, name, tmp_path / "interrupted", *options)
    assert len(status(cluster, tmp_path / "interrupted", job)["attempts"]) >= 3, log
    if name != "hf_trainer.py":  # which prints no steps
        trained = re.findall(r"^trained step (\d+)$", log, re.MULTILINE)
        assert trained == [str(step) for step in range(NUM_STEPS)]
    weights = re.compile(r"^weights (\w+)$", re.MULTILINE)
    assert len(weights.findall(whole)) == 1, whole
    # A program that completes after the signal is run once more, since exit code 0 can also mean: saved.
    assert set(weights.findall(log)) == set(weights.findall(whole))


def test_the_mpi4py_script_of_the_tutorial_trains_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    sizes = ["--epochs", "1", "--num-samples", "128", "--embedding", "32", "--dropout", "0", "--no-shuffle"]
    lesson = "lesson_mpi4py.py"
    _, log = run_to_the_end(cluster, lesson, tmp_path / "slurm", "--mpi", "pmi2", arguments=sizes)
    by_mpiexec = [str(BIN / "mpiexec"), "-n", "2", str(BIN / "python"), str(EXAMPLES / lesson), *sizes]
    expected = cluster.run(by_mpiexec, env=ENVIRONMENT, cwd=tmp_path)
    losses = re.compile(r"^epoch 1 loss \S+$", re.MULTILINE)
    assert len(losses.findall(expected.stdout)) == 2, expected.stdout
    assert losses.findall(log) == losses.findall(expected.stdout)
