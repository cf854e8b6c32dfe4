"""The smallest training that covers all problems of a restart: its data, options and results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from data_gen import Recipe, generate
from ddp_hpc.base.run_state import RunState, read_state

from .runs import records

MODEL = ["--model", "tests.training.small_model:small"]
# 51 samples in steps of 16: two ranks share a last batch of 3. With dropout and a warm-up.
DATA = [*MODEL, "--data", "train.h5", "--batch-size", "4", "--accumulate", "2", "--warmup-steps", "6"]
SAVING = ["--snapshot-dir", "run", "--metrics", "m.jsonl"]
EVERY_STEP = [*SAVING, "--snapshot-every-steps", "1"]
EPOCHS = 4
STEPS = 4 * EPOCHS


def make_data(folder: Path) -> Path:
    """Writes train.h5, and files that differ from it in one respect."""
    recipe = Recipe(num_samples=51, src_shape=(1, 8), tgt_shape=(4, 8))
    generate(recipe, folder / "train.h5")
    generate(replace(recipe, dtype="float64"), folder / "float64.h5")
    generate(replace(recipe, num_samples=50), folder / "fewer.h5")
    generate(replace(recipe, src_shape=(1, 16), tgt_shape=(4, 16)), folder / "wider.h5")
    return folder


def make_home(folder: Path, data: Path) -> Path:
    """Creates a directory for runs with the data, if necessary."""
    folder.mkdir(exist_ok=True)
    for path in data.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def trained(home: Path) -> list[dict[str, Any]]:
    """Each step without its times."""
    return [
        {key: value for key, value in line.items() if key not in ("data_s", "step_s")}
        for line in records(home / "m.jsonl")
    ]


def state_of(home: Path) -> RunState:
    """The state in the run directory."""
    return read_state(home / "run") or RunState("none", 0, "")


def snapshot_files(home: Path) -> dict[str, bytes]:
    """All files of the run directory except the state."""
    run = home / "run"
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path != run / "state"
    }


def assert_equal(home: Path, other: Path, steps: int) -> None:
    """Compares every step, and the tensors and random numbers of the last snapshot, bit for bit."""
    assert trained(home) == trained(other)
    assert [line["step"] for line in trained(home)] == list(range(1, steps + 1))
    last = Path("run", f"step_{steps:08d}")
    names = sorted(path.name for path in (other / last).glob("*.safetensors"))
    assert len(names) >= 2
    assert sorted(path.name for path in (home / last).glob("*.safetensors")) == names
    for name in names:
        assert (home / last / name).read_bytes() == (other / last / name).read_bytes(), name
