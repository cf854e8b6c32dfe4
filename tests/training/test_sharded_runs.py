"""Runs whose ranks save their shards: other numbers of ranks, other strategies, kills and damage."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ddp_hpc.training.snapshots.snapshot_files import read_snapshot

from .forked import Forks
from .runs import LINEAR
from .test_resume import _kill_often
from .tiny import DATA, EPOCHS, EVERY_STEP, SAVING, STEPS, assert_equal, make_home, state_of, trained

FSDP = [*DATA, *EVERY_STEP, "--strategy", "fsdp"]
# The same global batch of 12 on 1, 2 and 3 ranks, without dropout, in float64.
EXACT = ["--data", "float64.h5", "--dropout", "0", "--lr-scaling", "none", *SAVING, "--keep", "20"]


def _batch(data_ranks: int) -> list[str]:
    return ["--batch-size", str(12 // data_ranks)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, forks: Forks) -> list[float]:
    """The losses of two epochs in one process."""
    home = make_home(tmp_path_factory.mktemp("single"), tiny_data)
    forks.run(*EXACT, *_batch(1), "--epochs", "2", cwd=home, ranks=1)
    return [line["loss"] for line in trained(home)]


# Written by the version of 2026-11-23, with 2 ranks and a learning rate of 2 * 0.001.
CHAINS = [
    # The options, the number of ranks, and the number of ranks with different samples.
    [("--strategy fsdp", 2, 2), ("", 1, 1), ("--strategy fsdp", 3, 3), ("--strategy fsdp", 1, 1)],
    [("--strategy fsdp", 2, 2), ("--strategy tp", 2, 1), ("", 2, 2), ("--strategy pp", 2, 1)],
    [
        ("--mesh dp=2,fsdp=2", 4, 4),
        ("--mesh fsdp=2,tp=2", 4, 2),
        ("--strategy zero", 3, 3),
        ("--mesh pp=2,tp=2", 4, 1),
        ("", 2, 2),
    ],
]


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(CHAINS[0], id="ranks", marks=pytest.mark.check),
        pytest.param(CHAINS[1], id="strategies", marks=pytest.mark.check),
        pytest.param(CHAINS[2], id="meshes", marks=pytest.mark.soak),
    ],
)
def test_each_attempt_on_other_ranks_and_with_another_strategy_equals_one_process(
    chain: list[tuple[str, int, int]], one_process: list[float], home: Path, forks: Forks
) -> None:
    for step, (options, ranks, data_ranks) in enumerate(chain, start=1):
        single = ["--single-rank-group"] if ranks == 1 and "fsdp" in options else []
        words = [*EXACT, *_batch(data_ranks), *options.split(), *single, "--epochs", "2"]
        job = forks.run(*words, "--max-steps", str(2 * step), cwd=home, ranks=ranks)
        assert step == 1 or f"resuming after step {2 * (step - 1)} " in job.words()
        # Only a state that is the same on all ranks is written by rank 0 alone.
        is_sharded = any(name in options for name in ("fsdp", "tp", "pp", "zero"))
        files = read_snapshot(home / "run" / f"step_{2 * step:08d}").about["files"]["model"]
        assert len(files) == (ranks if is_sharded else 1)
    found = [line["loss"] for line in trained(home)]
    assert len(found) == 2 * len(chain)
    assert found == pytest.approx(one_process[: len(found)], abs=1e-9)


@pytest.mark.check
def test_a_sharded_run_killed_at_random_moments_ends_like_an_uninterrupted_one(
    home: Path, tiny_data: Path, forks: Forks
) -> None:
    options = [*FSDP, "--epochs", str(EPOCHS)]
    other = make_home(home / "other", tiny_data)
    forks.run(*options, cwd=other, ranks=2)
    _kill_often(home, lambda: forks.start(*options, cwd=home, ranks=2), random.Random(2), 2, 0.3)
    forks.run(*options, cwd=home, ranks=2)
    assert_equal(home, other, STEPS)
    assert not list((home / "run").glob(".step_*")), "the partial files of killed ranks are removed"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_sharded_run_killed_40_times_ends_like_an_uninterrupted_one(
    home: Path, tiny_data: Path, forks: Forks
) -> None:
    options = [*FSDP, "--epochs", "60"]
    other = make_home(home / "other", tiny_data)
    job = forks.start(*options, cwd=other, ranks=3)
    assert job.wait(600) == [0] * 3, job.words()
    _kill_often(home, lambda: forks.start(*options, cwd=home, ranks=3), random.Random(40), 40, 1.0)
    job = forks.start(*options, cwd=home, ranks=3)
    assert job.wait(600) == [0] * 3, job.words()
    assert_equal(home, other, 3 * 60)


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, forks: Forks) -> Path:
    """The directory of an uninterrupted fsdp run of 2 ranks and 6 steps."""
    home = make_home(tmp_path_factory.mktemp("sharded"), tiny_data)
    forks.run(*FSDP, "--epochs", "2", "--max-steps", "6", cwd=home, ranks=2)
    return home


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("model-00001.safetensors", _flip_a_bit, "a SHA-256 checksum does not match"),
        pytest.param(
            "training-00000.safetensors",
            _flip_a_bit,
            "a SHA-256 checksum does not match",
            marks=pytest.mark.soak,
        ),
        ("training-00001.safetensors", Path.unlink, "cannot be read"),
    ],
)
@pytest.mark.parametrize(
    ("options", "ranks"), [("--strategy fsdp", 2), pytest.param("", 1, marks=pytest.mark.check)]
)
def test_a_damaged_shard_is_skipped_on_all_ranks_together(
    sharded: Path, home: Path, forks: Forks, name: str, damage: object, words: str, options: str, ranks: int
) -> None:
    shutil.copytree(sharded / "run", home / "run")
    shutil.copy(sharded / "m.jsonl", home)
    newest = home / "run" / "step_00000006"
    assert callable(damage)
    damage(newest / name)
    again = [*DATA, *EVERY_STEP, *options.split(), "--epochs", "2", "--max-steps", "6"]
    again += ["--batch-size", str(8 // ranks)]
    job = forks.run(*again, cwd=home, ranks=ranks)
    said = [line for line in job.words().splitlines() if "warning: " in line]
    assert len(said) == 1, job.words()
    assert f"{newest.name}/{name}" in said[0]
    assert words in said[0]
    assert said[0].endswith("trying the previous snapshot")
    assert "resuming after step 5 " in job.words()
    if ranks == 2:
        assert_equal(home, sharded, 6)
    assert state_of(home).step == 6


def test_a_full_disk_is_a_warning_on_all_ranks_and_an_error_at_the_end(
    home: Path, tiny_disk: Path, forks: Forks
) -> None:
    # One snapshot takes about 240 KiB, and 400 KiB are free.
    (tiny_disk / "others.bin").write_bytes(bytes(624 * 2**10))
    words = [*LINEAR, "--src-shape", "200", "--tgt-shape", "100", "--num-samples", "64", "--strategy", "fsdp"]
    words += ["--snapshot-dir", str(tiny_disk), "--snapshot-every-steps", "1", "--max-steps", "3"]
    words += ["--batch-size", "4"]
    job = forks.start(*words, cwd=home, ranks=2)
    assert job.wait() == [1, 1], job.words()
    warnings = [line for line in job.words().splitlines() if "WARNING: the snapshot" in line]
    assert len(warnings) == 2, job.words()
    assert all("No space left on device (rank " in line for line in warnings)
    assert all(line.endswith("Training continues; free disk space") for line in warnings)
    [line] = job.errors()
    assert "could not save step 3" in line
    assert "the newest snapshot is from step 1" in line
    (tiny_disk / "others.bin").unlink()
    assert "resuming after step 1 " in forks.run(*words, cwd=home, ranks=2).words()


@pytest.mark.check
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("tp", marks=pytest.mark.soak)])
def test_a_snapshot_has_the_same_tensors_as_a_checkpoint_of_torch(
    home: Path, forks: Forks, strategy: str
) -> None:
    job = forks.start(strategy, cwd=home, ranks=2, program="tests.training.beside_dcp")
    assert job.wait() == [0, 0], job.words()
    dcp_to_torch_save(home / "dcp", home / "dcp.pt")
    theirs = torch.load(home / "dcp.pt", weights_only=True)
    ours = read_snapshot(home / "ours" / "step_00000001")
    assert set(ours.model) == set(theirs["model"])
    for name, tensor in theirs["model"].items():
        assert torch.equal(ours.model[name], tensor), name
    assert len(theirs["optimizer"]) >= 2 * len(theirs["model"])
    for key, tensor in theirs["optimizer"].items():
        assert torch.equal(ours.training[key], tensor), key
