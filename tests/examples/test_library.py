"""The examples of docs/how-to/use-the-library.md run as described on the page."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_hpc
from tests.conftest import PROJECT
from tests.mpi.conftest import OPENMPI_SETTINGS
from tests.training.forked import Forks
from tests.training.runs import BIN, run, start, succeeded

EXAMPLES = PROJECT / "docs" / "examples"
PAGE = (PROJECT / "docs" / "how-to" / "use-the-library.md").read_text()
BY_HAND, OURS = ((EXAMPLES / f"lesson_{name}.py").read_text() for name in ("mpi4py", "ddp_hpc"))
_SIDE_BY_SIDE, _NAMES = PAGE.split("## All components in one loop")
BLOCKS = re.findall(r"```python\n(.*?)```", _NAMES, re.DOTALL)


LESSON = ("-m", "tests.examples.script", str(EXAMPLES / "lesson_mpi4py.py"))


def _environment() -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return {"MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}


@pytest.mark.check
def test_both_scripts_have_the_same_losses(tmp_path: Path, forks: Forks) -> None:
    sizes = ["--epochs", "2", "--num-samples", "128", "--embedding", "16", "--dropout", "0", "--no-shuffle"]
    argv = [*start(2), *LESSON, *sizes]
    # Our script divides the cores among the ranks itself.
    printed = succeeded(run(argv, tmp_path, env=_environment())).stdout
    job = forks.start(
        *(EXAMPLES / "lesson_ddp_hpc.py", *sizes), cwd=tmp_path, ranks=2, program="tests.examples.script"
    )
    assert job.wait() == [0, 0], job.words()
    by_hand, ours = (
        [float(loss) for loss in re.findall(r"^epoch \d+ loss (\S+)$", text, re.MULTILINE)]
        for text in (printed, job.words())
    )
    assert len(ours) == 4  # 128 samples by 2 * 32, twice
    # The scripts shard the samples of a step differently, so sums are rounded differently.
    assert ours == pytest.approx(by_hand, rel=1e-3)
    assert ours[:2] == pytest.approx(by_hand[:2], rel=1e-5)


@pytest.mark.soak
def test_the_mpi4py_script_has_the_same_losses_under_open_mpi_and_exec(
    tmp_path: Path, openmpi_mpiexec: Path
) -> None:
    sizes = ["--epochs", "1", "--num-samples", "128", "--embedding", "16", "--dropout", "0", "--no-shuffle"]
    program = [*LESSON, *sizes]
    openmpi = [str(openmpi_mpiexec), "-n", "2", str(openmpi_mpiexec.parent / "python")]
    printed = [
        succeeded(run(argv, tmp_path, env={**_environment(), **OPENMPI_SETTINGS})).stdout
        for argv in (
            [*start(2), *program],
            [*start(2), "-m", "ddp_hpc.exec", "python", *program],
            [*openmpi, *program],
            [*openmpi, "-m", "ddp_hpc.exec", openmpi[-1], *program],
        )
    ]
    losses = [re.findall(r"^epoch 1 loss \S+$", text, re.MULTILINE) for text in printed]
    assert len(losses[0]) == 2
    assert losses == [losses[0]] * 4


def test_the_page_quotes_both_scripts_unchanged() -> None:
    assert re.findall(r"```python\n(.*?)```", _SIDE_BY_SIDE, re.DOTALL) == [BY_HAND, OURS]


def test_every_public_name_is_used_in_an_example() -> None:
    assert {name for name in ddp_hpc.__all__ if f"ddp_hpc.{name}" not in "".join(BLOCKS)} <= {
        "Batch", "FileDataset", "JobDeadline", "Snapshots", "Task",
    }, "four are types of return values, and own-model.md has examples of Task"  # fmt: skip
    for name in ddp_hpc.__all__:
        assert f"`ddp_hpc.{name}" in PAGE


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.check), 2])
def test_every_example_runs(tmp_path: Path, forks: Forks, ranks: int) -> None:
    """All examples run in one process per rank, one after the other."""
    for number, block in enumerate(BLOCKS):
        (tmp_path / f"block{number}.py").write_text(block)
    program = "".join(f"runpy.run_path('block{number}.py')\n" for number in range(len(BLOCKS)))
    (tmp_path / "all.py").write_text(f"import runpy\n{program}")
    job = forks.start("all.py", cwd=tmp_path, ranks=ranks, program="tests.examples.script")
    assert job.wait() == [0] * ranks, job.words()
    said = job.words()
    for line in (f"{ranks} ranks on 1 node(s)", "0 steps are done", "epoch 3 loss", "ends epoch 2"):
        assert said.count(line) == 1, said
    for place in ("runs/all", "runs/own/step_00000025", f"traces/own/rank00000-of-{ranks:05d}.json.gz"):
        assert (tmp_path / place).exists()


_SLOW_SCRIPT = """
import time
import torch
from torch import nn
import ddp_hpc

with ddp_hpc.distributed() as world:
    data = (torch.rand(400, 4), torch.rand(400, 1))
    model = ddp_hpc.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    loader = world.loader(data, batch_size=2, epochs=1000)
    with ddp_hpc.snapshots(None, model=model, optimizer=optimizer, loader=loader) as snapshots:
        for batch in loader:
            optimizer.zero_grad()
            (nn.functional.mse_loss(model(batch.src), batch.tgt) * batch.weight).backward()
            optimizer.step()
            time.sleep(0.05)
            if snapshots.step(batch.step):
                break
"""


@pytest.mark.soak
def test_a_script_resumes_over_several_jobs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_SLOW_SCRIPT)
    site = ["--profile", "generic_pbs", "--nodes", "1", "--ranks-per-node", "2", "--walltime", "00:10:00"]
    command = ["--", "python", "mine.py"]
    for words in (
        ["render", *site, "--name", "mine", "-o", "mine.pbs", *command],
        ["rehearse", "mine.pbs", "--here", "--walltime-s", "30", "--max-jobs", "2"],
    ):
        done = run([str(BIN / "ddp-hpc"), *words], tmp_path)
    assert done.returncode == 75, done.stderr
    said = done.stdout + done.stderr
    first, second = map(int, re.findall(r"stopped at step (\d+): the job's time limit is near", said))
    assert 0 < first < second
    assert f"resuming after step {first} " in said
    assert not (tmp_path / "runs").exists()  # the steps of a rehearsal do not count


@pytest.mark.soak
def test_mypy_checks_the_types_of_the_public_names(tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(
        "import ddp_hpc\n"
        "with ddp_hpc.distributed() as world:\n"
        "    for batch in world.loader('x.h5'):\n"
        "        reveal_type((world, batch.src, batch.step))\n"
        "ddp_hpc.wrap('no model')\n"
    )
    argv = [sys.executable, "-m", "mypy", "--follow-imports=silent", "typed.py"]
    done = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, check=False, env={"MYPYPATH": str(PROJECT)}
    )
    assert "tuple[ddp_hpc.library.connected_world.ConnectedWorld, torch._tensor.Tensor, int]" in done.stdout
    assert 'Argument 1 to "wrap" has incompatible type "str"' in done.stdout
