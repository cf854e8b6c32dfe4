"""The decoder has the losses of one process with every strategy.

The vocabulary of 100 tokens is padded to 128 in products.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from .forked import Forks
from .runs import losses

OPTIONS = ["--model", "decoder", "--model-option", "layers=2", "--model-option", "width=32"]
OPTIONS += ["--model-option", "tied=False", "--data", "../tokens.h5", "--dropout", "0", "--max-steps", "6"]
OPTIONS += ["--lr-scaling", "none", "--weight-decay", "0.1", "--clip-norm", "0.5", "--metrics", "m.jsonl"]


def losses_of(forks: Forks, home: Path, ranks: int, options: str) -> list[float]:
    home.mkdir()
    job = forks.start(*OPTIONS, *options.split(), cwd=home, ranks=ranks)
    assert job.wait(timeout_s=300.0) == [0] * ranks, job.words()  # inductor compiles for minutes
    return losses(home / "m.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoders")
    draw = np.random.default_rng(1)
    with h5py.File(folder / "tokens.h5", "w") as file:
        for name in ("src", "tgt"):
            file[name] = draw.integers(100, size=(80, 16), dtype=np.uint8)
        file.attrs["num_classes"] = 100
    return folder


@pytest.fixture(scope="module")
def single(folder: Path, forks: Forks) -> list[float]:
    return losses_of(forks, folder / "single", 1, "--batch-size 16")


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, "--batch-size 4 --accumulate 4"),
        pytest.param(2, "--batch-size 8 --strategy fsdp", marks=pytest.mark.check),
        (2, "--batch-size 16 --strategy tp"),
        pytest.param(2, "--batch-size 8", marks=pytest.mark.check),
        pytest.param(2, "--batch-size 8 --strategy zero", marks=pytest.mark.check),
        pytest.param(2, "--batch-size 16 --strategy pp", marks=pytest.mark.check),
        pytest.param(2, "--batch-size 8 --compile", marks=pytest.mark.soak),
        pytest.param(2, "--batch-size 8 --strategy fsdp --compile", marks=pytest.mark.soak),
        pytest.param(4, "--batch-size 8 --mesh fsdp=2,tp=2", marks=pytest.mark.soak),
    ],
)
def test_a_run_has_the_losses_of_one_process(
    ranks: int, options: str, folder: Path, single: list[float], forks: Forks
) -> None:
    name = f"{ranks}-{options.replace(' ', '')}".replace("=", "")
    assert losses_of(forks, folder / name, ranks, options) == pytest.approx(single, rel=2e-6)
