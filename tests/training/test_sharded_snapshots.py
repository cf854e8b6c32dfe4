"""Snapshots of which each rank has written its shards: resharding, damage, and a rank whose disk is full."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ddp_hpc.export import main as export
from ddp_hpc.training.snapshots.snapshot_files import read_snapshot
from ddp_hpc.training.snapshots.stored_tensors import DamagedSnapshotError

from .forked import Forks
from .tiny import SAVING, trained

WORDS = ["--data", "float64.h5", "--dropout", "0", "--lr-scaling", "none", "--epochs", "2"]


@pytest.fixture
def sharded(home: Path, forks: Forks) -> Path:
    """Two snapshots of a run with fsdp on two ranks."""
    saving = ["--strategy", "fsdp", "--snapshot-every-steps", "1", "--max-steps", "2"]
    forks.run(*WORDS, *SAVING, "--batch-size", "8", *saving, cwd=home, ranks=2)
    return home / "run"


def test_each_rank_writes_its_shards_which_together_are_the_model(sharded: Path, tmp_path: Path) -> None:
    newest = sharded / "step_00000002"
    assert sorted(path.name for path in newest.iterdir()) == [
        "model-00000.safetensors",
        "model-00001.safetensors",
        "snapshot.json",
        "training-00000.safetensors",
        "training-00001.safetensors",
    ]
    found = read_snapshot(newest).model
    halves = [safetensors.torch.load_file(newest / f"model-0000{rank}.safetensors") for rank in (0, 1)]
    for name, whole in found.items():
        assert torch.equal(whole, torch.cat([half[name] for half in halves])), name
    with pytest.raises(SystemExit) as ended:
        export([str(newest), str(tmp_path / "model.safetensors")])
    assert not ended.value.code
    exported = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(exported[name], whole) for name, whole in found.items())
    assert len(exported) == len(found)


def test_two_ranks_one_rank_three_ranks_have_the_losses_of_one_process(home: Path, forks: Forks) -> None:
    forks.run(*WORDS, "--metrics", "m.jsonl", "--batch-size", "12", cwd=home, ranks=1)
    whole = [line["loss"] for line in trained(home)]
    (home / "m.jsonl").unlink()
    plans = [
        (2, "fsdp", "6"),
        (1, "ddp", "12"),
        (3, "fsdp", "4"),
        (2, "tp", "12"),
        (2, "pp", "12"),
        (2, "ddp", "6"),
    ]
    for step, (ranks, strategy, batch_size) in enumerate(plans, start=1):
        options = ["--strategy", strategy, "--batch-size", batch_size, "--max-steps", str(step)]
        words = forks.run(*WORDS, *SAVING, *options, cwd=home, ranks=ranks).words()
        assert step == 1 or f"resuming after step {step - 1}" in words
    assert [line["loss"] for line in trained(home)] == pytest.approx(whole[: len(plans)], abs=1e-9)


def test_damage_anywhere_in_the_files_is_found(sharded: Path, tmp_path: Path) -> None:
    snapshot = sharded / "step_00000002"
    names = sorted(path.name for path in snapshot.iterdir())
    for seed in range(200):
        chance = random.Random(seed)
        path = snapshot / names[seed % len(names)]
        good = path.read_bytes()
        content = bytearray(good)
        if seed % 7 == 0:
            path.unlink()
        elif seed % 2:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
        else:
            path.write_bytes(content[: chance.randrange(len(content))])
        with pytest.raises(DamagedSnapshotError, match=path.name):  # noqa: PT012
            found = read_snapshot(snapshot)
            for tensors in (found.model, found.training):
                dict(tensors)  # reads all tensors
        path.write_bytes(good)
    assert read_snapshot(snapshot).model


@pytest.mark.parametrize("kind", ["flipped", "missing"])
def test_a_run_resumes_from_the_snapshot_before_a_damaged_one(sharded: Path, forks: Forks, kind: str) -> None:
    path = sharded / "step_00000002" / "training-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    if kind == "flipped":
        path.write_bytes(content)
    options = ["--strategy", "fsdp", "--batch-size", "8", "--max-steps", "3"]
    words = forks.run(*WORDS, *SAVING, *options, cwd=sharded.parent, ranks=2).words()
    assert f"{path.name}" in words
    assert "trying the previous snapshot" in words
    assert "resuming after step 1 " in words


def test_if_all_are_damaged_the_run_ends_on_all_ranks_in_one_line(sharded: Path, forks: Forks) -> None:
    for step in (1, 2):
        path = sharded / f"step_0000000{step}" / "model-00001.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    options = ["--strategy", "fsdp", "--batch-size", "8", "--max-steps", "3"]
    job = forks.start(*WORDS, *SAVING, *options, cwd=sharded.parent, ranks=2)
    assert job.wait() == [2, 2]
    (line,) = job.errors()
    assert "none of its 2 snapshots is valid. Nothing was deleted" in line
