"""Models of which no rank holds the whole: they are created on the meta device, and filled shard by shard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_hpc.data.in_memory import samples_of_arrays
from ddp_hpc.training.tasks.decoder import decoder
from ddp_hpc.training.tasks.flops import flops_per_sample
from ddp_hpc.training.tasks.task import SampleSpec

from .forked import Forks
from .runs import records

MODELS = "tests.training.meta_models:"
MESHES = ["dp=2,fsdp=2", "fsdp=2,tp=2", "pp=2,tp=2", "pp=2,dp=2", "dp=2,tp=2", "pp=4"]
PROGRAM = "tests.training.meta_started"


def _started(
    forks: Forks, home: Path, model: str, *meshes: str, ranks: int
) -> tuple[str, list[dict[str, Any]]]:
    """The output, and what each rank has seen of each mesh."""
    job = forks.start(f"{MODELS}{model}", *meshes, cwd=home, ranks=ranks, program=PROGRAM)
    assert job.wait() == [0] * ranks, job.words()
    return job.words(), [json.loads((home / f"seen-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("model", "ranks", "meshes"),
    [
        ("net", 2, ["fsdp=2", "tp=2", "pp=2"]),
        ("gpt", 2, ["fsdp=2", "tp=2"]),
        pytest.param("net", 3, ["fsdp=3"], marks=pytest.mark.check),
        pytest.param("net", 4, MESHES, marks=pytest.mark.check),
        pytest.param("half", 2, ["fsdp=2", "tp=2", "pp=2"], marks=pytest.mark.check),
        pytest.param("recurrent", 2, ["fsdp=2", "pp=2"], marks=pytest.mark.check),
    ],
)
def test_initial_values_are_bit_for_bit_those_of_one_process(
    model: str, ranks: int, meshes: list[str], forks: Forks, tmp_path: Path
) -> None:
    words, of_ranks = _started(forks, tmp_path, model, *meshes, ranks=ranks)
    assert "note: --model" not in words
    for seen in of_ranks:
        assert list(seen) == meshes
        for mesh, one in seen.items():
            assert one["wrong"] == [], mesh
            assert one["was_on_meta"], mesh
            assert one["freed"], f"{mesh}: nothing was computed again"
            assert one["checked"], mesh
            assert one["same_ties"], mesh
            assert one["same_generator"], mesh
            assert one["same_data"], mesh
            assert bool(one["sharded"]) == ("fsdp" in mesh or "tp" in mesh), mesh


def test_a_stage_has_no_memory_for_the_tensors_of_other_stages(forks: Forks, tmp_path: Path) -> None:
    _, of_ranks = _started(forks, tmp_path, "net", "pp=4", ranks=4)
    # Five tensors in each block, and two in the head.
    assert [seen["pp=4"]["checked"] for seen in of_ranks] == [5, 5, 5, 7]
    assert [seen["pp=4"]["on_meta"] for seen in of_ranks] == [17, 17, 17, 15]


def test_a_model_that_cannot_be_on_the_meta_device_is_created_in_memory(forks: Forks, tmp_path: Path) -> None:
    words, of_ranks = _started(forks, tmp_path, "kept", "fsdp=2", "pp=2", ranks=2)
    assert (
        f"note: --model {MODELS}kept: it cannot be created in parts (RuntimeError: _apply(): Couldn't "
        "swap Linear.weight), so every rank creates the whole model in memory before it keeps only its own "
        "part"
    ) in words
    for seen in of_ranks:
        assert all(one["wrong"] == [] and not one["was_on_meta"] for one in seen.values())
        # The other stage was released.
        assert seen["pp=2"]["on_meta"] > 0


def test_a_model_that_a_thread_fills_is_created_in_memory(forks: Forks, tmp_path: Path) -> None:
    words, of_ranks = _started(forks, tmp_path, "in_a_thread", "tp=2", ranks=2)
    assert (
        f"note: --model {MODELS}in_a_thread: it cannot be created in parts (its factory starts thr" in words
    )
    assert [seen["tp=2"]["wrong"] for seen in of_ranks] == [[], []]


def test_values_that_were_not_recorded_are_those_of_one_process(forks: Forks, tmp_path: Path) -> None:
    words, of_ranks = _started(forks, tmp_path, "unseen", "tp=2", ranks=2)
    assert "note: the factory set head.weight in a way that cannot be reproduced" in words
    assert [seen["tp=2"]["wrong"] for seen in of_ranks] == [[], []]


def test_if_the_values_differ_between_ranks_those_of_rank_0_are_used(forks: Forks, tmp_path: Path) -> None:
    words, of_ranks = _started(forks, tmp_path, "random", "tp=2", ranks=2)
    assert f"note: --model {MODELS}random: its initial values differ between ranks" in words
    assert of_ranks[0]["tp=2"]["sum"] == of_ranks[1]["tp=2"]["sum"]


@pytest.mark.check
def test_training_and_resuming_gives_the_losses_of_one_process(forks: Forks, tmp_path: Path) -> None:
    words = ["--model", f"{MODELS}net", "--snapshot-dir", "run", "--lr-scaling", "none", "--epochs", "3"]
    expected, found = tmp_path / "one", tmp_path / "some"
    expected.mkdir()
    found.mkdir()
    forks.run(*words, "--batch-size", "12", "--metrics", "m.jsonl", cwd=expected, ranks=1)
    for step, (options, ranks, batch) in enumerate(
        [("--mesh fsdp=2,tp=2", 4, "6"), ("--strategy pp", 2, "12"), ("--strategy fsdp", 3, "4")], start=1
    ):
        more = ["--batch-size", batch, "--metrics", "m.jsonl", "--max-steps", str(4 * step)]
        forks.run(*words, *options.split(), *more, cwd=found, ranks=ranks)
    losses = [[line["loss"] for line in records(home / "m.jsonl")] for home in (expected, found)]
    assert len(losses[0]) == 12
    assert losses[1] == pytest.approx(losses[0], abs=1e-9)


def test_a_run_with_a_summary_counts_operations_before_the_model_has_memory(
    forks: Forks, tmp_path: Path
) -> None:
    # Fake tensors left weak references to the parameters, which then could not be given memory.
    words = ["--model", f"{MODELS}net", "--max-steps", "2", "--batch-size", "4", "--summary", "s.json"]
    forks.run(*words, "--strategy", "fsdp", cwd=tmp_path, ranks=2)
    assert json.loads((tmp_path / "s.json").read_text())["flops_per_s"] > 0


def test_a_model_on_the_meta_device_has_the_operations_of_one_in_memory() -> None:
    task = decoder(SampleSpec((16,), (16,), 50), dropout=0.0)
    rows = torch.zeros(4, 16, dtype=torch.int64).numpy()
    samples = samples_of_arrays(rows, rows)
    in_memory = flops_per_sample(task, samples, torch.float32)
    # 4 layers of 16 x 16 scores with 128 features: two products, forward, and twice as many backward.
    of_attention = 4 * 3 * 2 * (2 * 16 * 16 * 128)
    # All matrix products of a token: 12 * 128^2 weights per layer, and those of 50 outputs, padded to 64.
    of_layers = 3 * 2 * 16 * (4 * 12 * 128**2 + 64 * 128)
    assert in_memory == of_attention + of_layers
    task.model.to("meta")
    assert flops_per_sample(task, samples, torch.float32) == in_memory
