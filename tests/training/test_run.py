"""Runs with every launcher, and their output files."""

import json
import os
from functools import cache

import pytest
import torch

from data_gen import Recipe, generate
from tests.conftest import PROJECT

from .runs import LINEAR, losses, records, succeeded, train

QUICK = ["--num-samples", "128", "--epochs", "2", "--batch-size", "16", *LINEAR]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The number of ranks, the finished run and its directory, by launcher."""
    return cache(lambda name: _start(name, tmp_path_factory.mktemp(name)))


def _start(name, folder):
    ranks, launcher = 1 if name == "single" else 2, "torchrun" if name == "torchrun" else "mpiexec"
    env = {"DDP_HPC_RUN_DIR": str(folder / "my run")}
    if name == "single":
        env["OMP_NUM_THREADS"] = "64"  # PBS exports the cores of the whole chunk to every rank
    done = train(*QUICK, "--summary", "s.json", cwd=folder, ranks=ranks, launcher=launcher, env=env)
    return ranks, succeeded(done), folder


@pytest.mark.parametrize("name", ["single", "hydra", pytest.param("torchrun", marks=pytest.mark.check)])
def test_every_launcher_starts_the_same_training(started, name):
    ranks, done, folder = started(name)
    summary = json.loads((folder / "s.json").read_text())
    assert summary["world"]["launcher"] == name
    assert summary["world"]["world_size"] == ranks
    assert summary["backend"] == ("gloo" if ranks > 1 else "none")
    assert summary["steps"] == 2 * 128 // (16 * ranks)
    assert summary["samples"] == 256
    assert summary["samples_per_s"] > 0
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["final_loss"] < summary["first_loss"]
    assert "samples/s" in done.stdout
    assert f"{ranks} rank" in done.stdout


@pytest.mark.parametrize("name", ["hydra", pytest.param("torchrun", marks=pytest.mark.check)])
def test_a_good_placement_is_one_line_and_a_table(started, name):
    _, done, folder = started(name)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(("placement: ", "warning: "))]
    assert line.startswith("placement: 2 ranks on 1 node, ")
    assert line.endswith(f" per rank, no problems found ({folder}/my run/placement.txt)")
    rows = [row.split() for row in (folder / "my run" / "placement.txt").read_text().splitlines()]
    assert [row[0] for row in rows[:3]] == ["rank", "0", "1"]
    told = json.loads((folder / "my run" / "placement.json").read_text())
    assert told["findings"] == []
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    assert [rank["versions"]["torch"] for rank in told["ranks"]] == [torch.__version__] * 2
    assert ("mpi" in told["ranks"][0]["versions"]) == (name == "hydra")


def test_omp_num_threads_above_the_number_of_cores_is_ignored(started):
    *_, folder = started("single")
    assert json.loads((folder / "s.json").read_text())["threads"] == len(os.sched_getaffinity(0))


def test_metrics_are_one_json_line_per_step_from_rank_0(tmp_path, forks):
    options = ["--warmup-steps", "4", "--lr", "0.001", "--metrics", "out/m.jsonl"]
    forks.run(*QUICK, *options, cwd=tmp_path, ranks=2)
    lines = records(tmp_path / "out" / "m.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert set(lines[0]) == {"step", "epoch", "loss", "lr", "samples", "data_s", "step_s"}
    assert [line["epoch"] for line in lines] == [1] * 4 + [2] * 4
    # Linear scaling over two ranks, reached in four steps.
    assert [line["lr"] for line in lines[:5]] == pytest.approx([0.0005, 0.001, 0.0015, 0.002, 0.002])
    assert all(0 <= line["data_s"] <= line["step_s"] for line in lines)


def test_epochs_is_the_number_of_epochs_that_run(tmp_path, forks):
    # A regression test: --epochs must not be ignored.
    forks.run(*QUICK, "--epochs", "3", "--metrics", "m.jsonl", cwd=tmp_path, ranks=1)
    assert records(tmp_path / "m.jsonl")[-1]["epoch"] == 3


def test_synthetic_data_is_created_once_and_reused(tmp_path, forks):
    first = forks.run(*QUICK, "--max-steps", "1", cwd=tmp_path, ranks=2)
    (path,) = (tmp_path / "data").iterdir()
    made = path.stat()
    second = forks.run(*QUICK, "--max-steps", "1", cwd=tmp_path, ranks=2)
    assert "made data/" in first.words()
    assert "using data/" in second.words()
    assert path.stat().st_mtime_ns == made.st_mtime_ns


def test_only_rank_0_prints(tmp_path, forks):
    words = forks.run(*QUICK, "--max-steps", "1", cwd=tmp_path, ranks=3).words()
    assert words.count("done: ") == 1
    assert words.count("world: ") == 1


def test_pt_and_safetensors_files_have_the_losses_of_the_hdf5_file(tmp_path, forks):
    recipe = Recipe(num_samples=64, src_shape=(20,), tgt_shape=(1,), distribution="learnable")
    found = []
    for suffix in ("h5", "pt", "safetensors"):
        generate(recipe, tmp_path / f"data.{suffix}")
        words = ["--data", f"data.{suffix}", "--epochs", "1", "--model", "linear"]
        forks.run(*words, "--metrics", f"{suffix}.jsonl", cwd=tmp_path, ranks=1)
        found.append(losses(tmp_path / f"{suffix}.jsonl"))
    assert len(found[0]) == 2
    assert found[0] == found[1] == found[2]


@pytest.mark.check
def test_device_count_starts_one_rank_per_device(tmp_path, no_gpu):
    """A CPU counts as one device; torchrun would start more ranks for several devices."""
    options = ["--max-steps", "1", "--discovery", "device_count", "--summary", "s.json"]
    succeeded(train(*QUICK, *options, cwd=tmp_path))
    world = json.loads((tmp_path / "s.json").read_text())["world"]
    assert (world["launcher"], world["world_size"]) == ("torchrun", 1)


def test_help_needs_no_torch_and_shows_examples(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch must not be imported for --help')")
    done = succeeded(train("--help", cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{PROJECT}"}))
    assert "mpiexec -n 8 python -m ddp_hpc.train" in done.stdout


def test_torch_is_imported_without_garbage_collections(tmp_path):
    stub = "import gc, pathlib; pathlib.Path('enabled').write_text(str(gc.isenabled())); raise ImportError"
    (tmp_path / "torch.py").write_text(stub)
    train(cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{PROJECT}"})
    assert (tmp_path / "enabled").read_text() == "False"


def test_garbage_is_collected_during_the_training(tmp_path, forks):
    (tmp_path / "mine.py").write_text(
        "import gc\nfrom torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def forward(self, inputs):\n"
        "        print('enabled', gc.isenabled())\n"
        "        return super().forward(inputs)\n"
        "def net():\n    return Net(20, 1)\n"
    )
    words = forks.run(*QUICK, "--model", "mine:net", "--max-steps", "1", cwd=tmp_path, ranks=1).words()
    assert "enabled True" in words


def test_explicit_threads_are_used(tmp_path, forks):
    forks.run(*QUICK, "--max-steps", "1", "--threads", "1", "--summary", "s.json", cwd=tmp_path, ranks=1)
    assert json.loads((tmp_path / "s.json").read_text())["threads"] == 1
