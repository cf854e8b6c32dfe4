"""The decoder resumes with every strategy, and has the losses of a run in one process.

The vocabulary of 100 tokens is padded to 128 in products.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from .forked import Forks
from .runs import losses

SIZES = ["--model-option", "layers=2", "--model-option", "width=32", "--model-option", "tied=False"]
OPTIONS = [
    "--model",
    "decoder",
    *SIZES,
    "--data",
    "../tokens.h5",
    "--dropout",
    "0",
    "--lr-scaling",
    "none",
    "--warmup-steps",
    "2",
]
OPTIONS += ["--snapshot-dir", "run", "--metrics", "m.jsonl", "--weight-decay", "0.1", "--clip-norm", "0.5"]
STEPS, SAVED = 6, 3

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """A directory with the losses of one process, and snapshots after 3 steps, whole and sharded."""
    folder = tmp_path_factory.mktemp("decoders")
    draw = np.random.default_rng(1)
    with h5py.File(folder / "tokens.h5", "w") as file:
        for name in ("src", "tgt"):
            file[name] = draw.integers(100, size=(80, 16), dtype=np.uint8)
        file.attrs["num_classes"] = 100
    for name, ranks, more in (
        ("losses", 1, ["--batch-size", "16", "--max-steps", str(STEPS)]),
        ("whole", 1, ["--batch-size", "16", "--max-steps", str(SAVED)]),
        ("sharded", 2, ["--batch-size", "8", "--max-steps", str(SAVED), "--strategy", "fsdp"]),
    ):
        (folder / name).mkdir()
        forks.run(*OPTIONS, *more, cwd=folder / name, ranks=ranks)
    return folder


def resumed(home: Path, forks: Forks, name: str, saved: str, ranks: int, *options: str) -> list[float]:
    """The losses after the snapshot `saved`."""
    folder = home / name
    folder.mkdir()
    shutil.copytree(home / saved / "run", folder / "run")
    words = [*OPTIONS, "--max-steps", str(STEPS), *options]
    job = forks.start(*words, cwd=folder, ranks=ranks)
    assert job.wait(timeout_s=300.0) == [0] * ranks, job.words()  # inductor compiles for minutes
    assert f"resuming after step {SAVED}" in job.words()
    return losses(folder / "m.jsonl")


@pytest.mark.parametrize("saved", ["whole", "sharded"])
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, "--batch-size 4 --accumulate 4"),
        (2, "--batch-size 8 --strategy fsdp"),
        (2, "--batch-size 16 --strategy tp"),
        pytest.param(2, "--batch-size 8", marks=pytest.mark.check),
        pytest.param(2, "--batch-size 8 --strategy zero", marks=pytest.mark.check),
        pytest.param(2, "--batch-size 16 --strategy pp", marks=pytest.mark.check),
        pytest.param(1, "--batch-size 16 --compile", marks=pytest.mark.soak),
        pytest.param(2, "--batch-size 8 --compile", marks=pytest.mark.soak),
        pytest.param(2, "--batch-size 8 --strategy fsdp --compile", marks=pytest.mark.soak),
        pytest.param(4, "--batch-size 8 --mesh fsdp=2,tp=2", marks=pytest.mark.soak),
    ],
)
def test_a_resumed_run_has_the_losses_of_one_process(saved, ranks, options, home, forks):
    name = f"{saved}-{ranks}-{options.replace(' ', '')}".replace("=", "")
    found = resumed(home, forks, name, saved, ranks, *options.split())
    assert found == pytest.approx(losses(home / "losses" / "m.jsonl")[SAVED:], rel=2e-6)
