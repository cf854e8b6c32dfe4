"""`--cuda-graph`, `--tuned`, and steps without waits of the host, on one GPU; failures of ranks over NCCL.

Run on one H200: see docs/reference/what-has-been-run.md.
"""

import gzip
import json
import os
import signal
import time
from itertools import pairwise, repeat
from pathlib import Path

import pytest
import torch

from ddp_hpc.training.optimization.step_graph import use_one_stream
from ddp_hpc.training.tasks.decoder import decoder
from ddp_hpc.training.tasks.task import SampleSpec
from tests.gpu.runs import reference_losses, train, trained_losses
from tests.training.one_process import Steps
from tests.training.runs import SMALL, start, succeeded

if not torch.cuda.is_available():
    pytest.skip("no CUDA device (see tests/gpu/test_gpu.py)", allow_module_level=True)

pytestmark = pytest.mark.gpu
# 21 steps per epoch, of which the last one has half of the samples: DDP runs 11 steps before the capture.
RUN = ["--num-samples", "328", "--epochs", "2", "--batch-size", "16", *SMALL, "--dropout", "0"]
RUN += ["--optimizer", "adamw"]
# The same kernels run in both cases, but the learning rate is a float32 tensor in a graph.
SAME_KERNELS = 1e-4
OTHER_KERNELS = 2e-3


def _losses(tmp_path, *options):
    return trained_losses(*RUN, *options, cwd=tmp_path, timeout_s=300.0)


@pytest.mark.parametrize("group", ["", "--single-rank-group", "--single-rank-group --static-graph"])
@pytest.mark.parametrize(
    "more",
    [
        "",
        "--accumulate 2",
        "--clip-norm 0.5 --lr-schedule cosine",
        "--amp bf16",
    ],
)
def test_graphs_of_whole_steps_have_the_losses_of_eager_steps(tmp_path, more, group):
    if "accumulate" in more and "static" in group:
        pytest.skip("--static-graph cannot be used with --accumulate")
    options = [*more.split(), *group.split()]
    eager = reference_losses(*RUN, *options)
    assert len(eager) == (22 if "accumulate" in more else 42)
    graphs = _losses(tmp_path, *options, "--cuda-graph")
    assert graphs == pytest.approx(eager, rel=OTHER_KERNELS if "bf16" in more else SAME_KERNELS)


def test_tuned_steps_have_losses_close_to_those_of_eager_steps(tmp_path):
    eager = reference_losses(*RUN, "--amp", "bf16")
    assert _losses(tmp_path, "--tuned") == pytest.approx(eager, rel=2e-2)


def test_the_log_names_the_options_that_tuned_has_chosen(tmp_path):
    done = succeeded(train(*RUN, "--tuned", cwd=tmp_path, timeout_s=300.0))
    assert "--tuned: " in done.stdout
    assert "no --cuda-graph" not in done.stdout


def test_a_run_with_graphs_resumes_with_the_same_losses_bit_for_bit(tmp_path):
    options = ["--cuda-graph", "--single-rank-group", "--dropout", "0.1"]
    whole = _losses(tmp_path, *options)
    saving = ["--snapshot-dir", "snapshots"]
    begun = _losses(tmp_path, *options, *saving, "--max-steps", "15")
    assert begun + _losses(tmp_path, *options, *saving) == whole


def _steps(sizes=None, **options):
    def tokens():
        stored = torch.randint(64, (16, 32), device="cuda")
        for size in sizes or repeat(16):
            yield stored[:size], stored[:size]

    return Steps(decoder(SampleSpec((32,), (32,), 64), 0.1), tokens(), "cuda:0", **options)


@pytest.fixture
def without_waits():
    """Steps until the kernels are loaded; after that, each wait of the host is an error."""

    def run(steps, num):
        for _ in range(15):
            steps.step(16)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(num):
            steps.step(16)
        torch.cuda.set_sync_debug_mode("default")
        return steps.losses()

    yield run
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 0.1},
        {"amp": "fp16", "clip_norm": 1.0},
        {"amp": "bf16", "accumulate": 2},
        {"optimizer": "sgd"},
        {"cuda_graph": True},
        {"cuda_graph": True, "amp": "bf16", "clip_norm": 0.1, "accumulate": 2},
    ],
    ids=str,
)
def test_a_hundred_steps_run_without_a_wait_of_the_host(options, without_waits):
    with torch.cuda.stream(torch.cuda.current_stream()):  # restores the stream after the test
        if "cuda_graph" in options:
            use_one_stream(torch.device("cuda", 0))
        assert len(without_waits(_steps(**options), 100)) == 115


def test_a_wait_of_the_host_would_be_found(without_waits):
    steps = _steps(check_gradients=True)
    with pytest.raises(RuntimeError, match="synchroniz"):
        without_waits(steps, 1)


@pytest.mark.parametrize("smaller", [16, 8])
def test_steps_need_no_more_memory_after_the_captures(smaller):
    sizes = [smaller if number % 5 == 4 else 16 for number in range(40)]
    with torch.cuda.stream(torch.cuda.current_stream()):
        use_one_stream(torch.device("cuda", 0))
        steps = _steps(sizes, cuda_graph=True)
        allocated = []
        for size in sizes:
            steps.step(size)
            steps.losses()
            steps.pending.losses.clear()
            allocated.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    # Python can free memory of the time before later.
    assert all(later <= earlier for earlier, later in pairwise(allocated[20:])), allocated


def test_a_step_is_one_launch_of_a_graph_and_few_kernels(tmp_path):
    options = ["--trace-dir", "traces", "--trace-window", "15,1,3,1", "--cuda-graph", "--single-rank-group"]
    succeeded(train(*RUN, *options, cwd=tmp_path))
    [path] = (tmp_path / "traces").glob("*.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = [event for event in events if event.get("name", "").startswith("ProfilerStep#")]
    on_host = [event for event in steps if event.get("cat") == "user_annotation"]
    assert len(on_host) == 3
    for one in on_host:
        names = [e["name"] for e in events if one["ts"] <= e.get("ts", -1) < one["ts"] + one["dur"]]
        assert sum(name.startswith("cudaGraphLaunch") for name in names) == 1
        # The learning rate, the batch and the loss are copied outside of the graph.
        assert sum(name.startswith("cudaLaunchKernel") for name in names) < 20


ENDLESS = [*SMALL, "--num-samples", "328", "--batch-size", "16", "--epochs", "100000", "--dropout", "0"]


def _two_ranks(launch, tmp_path, *options):
    """Two ranks over NCCL with graphs, after 20 steps, and the process numbers of both."""
    argv = [*start(2, "torchrun"), "--max-restarts=0", "-m", "ddp_hpc.train", *ENDLESS, *options]
    process = launch.start(
        [*argv, "--metrics", "m.jsonl", "--cuda-graph", "--optimizer", "adamw"], cwd=tmp_path
    )
    until_s = time.monotonic() + 120
    while not (tmp_path / "m.jsonl").exists() or len((tmp_path / "m.jsonl").read_text().splitlines()) < 20:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s
        time.sleep(0.2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return process, [int(pid) for pid in children.split()]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL between ranks needs two GPUs")
def test_a_killed_rank_ends_a_job_over_nccl(launch, tmp_path):
    process, ranks = _two_ranks(launch, tmp_path)
    os.kill(ranks[-1], signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL between ranks needs two GPUs")
def test_a_rank_that_hangs_over_nccl_is_named(launch, tmp_path):
    process, ranks = _two_ranks(launch, tmp_path, "--hang-timeout", "10")
    os.kill(ranks[-1], signal.SIGSTOP)
    _, errors = process.communicate(timeout=90)
    assert process.returncode != 0
    assert "rank 1" in errors
