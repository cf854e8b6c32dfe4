"""Training on a CUDA device: `make test ARGS="-m gpu"`. Without a device, one line reports the skip."""

import json

import pytest
import torch

from ddp_hpc.training.snapshots.host_buffer import FileBuffer, specs_of
from tests.gpu.runs import train
from tests.training.runs import SMALL, losses, run, start, succeeded
from tests.training.test_host_buffer import loaded

if not torch.cuda.is_available():
    # At module level, so that pytest reports one skip instead of one per test.
    pytest.skip(
        "the GPU tests need a CUDA device; run them there: make test ARGS='-m gpu'", allow_module_level=True
    )

pytestmark = pytest.mark.gpu
SIZES = ["--num-samples", "128", "--epochs", "2", "--batch-size", "16", *SMALL, "--dropout", "0"]


def test_a_single_rank_trains_on_the_gpu(tmp_path):
    succeeded(train(*SIZES, "--summary", "s.json", "--metrics", "m.jsonl", cwd=tmp_path))
    assert json.loads((tmp_path / "s.json").read_text())["device"] == "cuda:0"
    found = losses(tmp_path / "m.jsonl")
    assert found[-1] < found[0]


def test_losses_on_the_gpu_equal_those_on_the_cpu(tmp_path):
    for device in ("cuda", "cpu"):
        options = ["--dtype", "float64", "--device", device, "--metrics", f"{device}.jsonl"]
        succeeded(train(*SIZES, *options, cwd=tmp_path))
    assert losses(tmp_path / "cuda.jsonl") == pytest.approx(losses(tmp_path / "cpu.jsonl"), rel=1e-9)


def test_one_rank_per_gpu_trains_over_nccl(tmp_path):
    ranks = torch.cuda.device_count()
    if ranks < 2:
        pytest.skip("NCCL between ranks needs two GPUs")
    succeeded(train(*SIZES, "--summary", "s.json", cwd=tmp_path, ranks=ranks))
    assert json.loads((tmp_path / "s.json").read_text())["backend"] == "nccl"


def test_more_ranks_than_gpus_are_refused_by_comparing_device_uuids(tmp_path):
    ranks = torch.cuda.device_count() + 1
    done = run([*start(ranks, "torchrun"), "-m", "ddp_hpc.train", *SIZES], tmp_path)
    assert done.returncode != 0
    assert "would share one device" in done.stderr


def test_ranks_with_one_visible_gpu_each_train_over_nccl(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL between ranks needs two GPUs")
    shown = "import os, runpy; os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']; "
    (tmp_path / "shown.py").write_text(f"{shown}runpy.run_module('ddp_hpc.train', run_name='__main__')")
    program = [str(tmp_path / "shown.py")]
    done = train(*SIZES, "--summary", "s.json", cwd=tmp_path, ranks=2, launcher="torchrun", program=program)
    succeeded(done)
    assert "2 devices" in done.stdout


def test_device_count_starts_one_rank_per_gpu(tmp_path):
    succeeded(train(*SIZES, "--discovery", "device_count", "--summary", "s.json", cwd=tmp_path))
    world = json.loads((tmp_path / "s.json").read_text())["world"]
    assert world["world_size"] == torch.cuda.device_count()


def test_a_save_copies_every_tensor_and_later_work_waits_for_the_copies():
    values = torch.randn(3000, 4000, device="cuda")
    tensors = {f"step/{number}": torch.tensor(float(number), device="cuda") for number in range(50)}
    tensors |= {"large": values, "transposed": values.T[:100], "halves": values.bfloat16()[0]}
    tensors["bytes"] = torch.arange(200, dtype=torch.uint8)  # on the CPU, like the state of a generator
    expected = {name: value.cpu().clone() for name, value in tensors.items()}
    buffer = FileBuffer(specs_of(tensors), is_pinned=True)
    for _ in range(3):
        buffer.fill(tensors.items())
        values.add_(1.0)
        buffer.wait()
        saved = loaded(buffer)
        for name, value in expected.items():
            assert torch.equal(saved[name], value), name  # never run
        values.sub_(1.0)
        expected |= {"large": values.cpu().clone(), "transposed": values.T[:100].cpu().clone()}
