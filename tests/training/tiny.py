"""The smallest training that has all that can go wrong with a restart: data, options, what came of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from data_gen import Recipe, generate
from ddp_hpc.run_directory import RunState, read_state

from .runs import records

# 51 samples in steps of 16: two ranks share a tail of 3. With dropout, and a ramp of the rate.
DATA = ["--data", "train.h5", "--batch-size", "4", "--accumulate", "2", "--warmup-steps", "6"]
SAVING = ["--snapshot-dir", "run", "--metrics", "m.jsonl"]
EVERY_STEP = [*SAVING, "--snapshot-every-steps", "1"]
EPOCHS = 4
STEPS = 4 * EPOCHS


def make_data(folder: Path) -> Path:
    """train.h5, and others that differ from it in one thing."""
    recipe = Recipe(num_samples=51, src_shape=(1, 8), tgt_shape=(4, 8))
    generate(recipe, folder / "train.h5")
    generate(replace(recipe, dtype="float64"), folder / "float64.h5")
    generate(replace(recipe, num_samples=50), folder / "fewer.h5")
    generate(replace(recipe, src_shape=(1, 16), tgt_shape=(4, 16)), folder / "wider.h5")
    return folder


def make_home(folder: Path, data: Path) -> Path:
    """A folder for runs, made if need be, with the data in it."""
    folder.mkdir(exist_ok=True)
    for path in data.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def trained(home: Path) -> list[dict[str, Any]]:
    """Each step but its times."""
    return [
        {key: value for key, value in line.items() if key not in ("data_s", "step_s")}
        for line in records(home / "m.jsonl")
    ]


def state_of(home: Path) -> RunState:
    """The run folder's word."""
    return read_state(home / "run") or RunState("none", 0, "")


def snapshot_files(home: Path) -> dict[str, bytes]:
    """All files of the run folder but the word."""
    run = home / "run"
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path != run / "state"
    }


def assert_equal(home: Path, other: Path, steps: int) -> None:
    """Every step, and the last snapshot's tensors and random numbers, to the last bit."""
    assert trained(home) == trained(other)
    assert [line["step"] for line in trained(home)] == list(range(1, steps + 1))
    for name in ("model.safetensors", "training.safetensors"):
        path = Path("run", f"step_{steps:08d}", name)
        assert (home / path).read_bytes() == (other / path).read_bytes(), name
