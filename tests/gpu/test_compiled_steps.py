"""Compiled steps, fp16, resuming and the memory of a training on one GPU, with NCCL in a group of one rank.

Run on one H200: see docs/reference/what-has-been-run.md.
"""

import gzip
import json

import pytest
import torch

from tests.gpu.runs import reference_losses, train, trained_losses
from tests.training.runs import SMALL, succeeded

if not torch.cuda.is_available():
    pytest.skip("no CUDA device (see tests/gpu/test_gpu.py)", allow_module_level=True)

pytestmark = pytest.mark.gpu
RUN = ["--num-samples", "160", "--epochs", "1", "--batch-size", "16", *SMALL, "--dropout", "0"]
# A loss of about 30; compiled kernels add in another order.
ACROSS_KERNELS = 2e-3


def _losses(tmp_path, *options):
    return trained_losses(*RUN, *options, cwd=tmp_path, timeout_s=300.0)


@pytest.mark.parametrize("group", ["", "--single-rank-group", "--single-rank-group --static-graph"])
@pytest.mark.parametrize("accumulate", ["1", "2"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_compiled_steps_have_the_losses_of_eager_steps(tmp_path, mode, accumulate, group):
    if mode == "reduce-overhead" and accumulate == "2":
        pytest.skip("these options cannot be combined")
    if "static" in group and accumulate == "2":
        pytest.skip("--static-graph cannot be used with --accumulate")
    options = ["--accumulate", accumulate, *group.split()]
    eager = reference_losses(*RUN, *options)
    compiled = _losses(tmp_path, *options, f"--compile={mode}")
    assert compiled == pytest.approx(eager, abs=ACROSS_KERNELS * max(eager))


@pytest.mark.parametrize("group", ["", "--single-rank-group"])
def test_training_in_fp16_scales_the_loss_and_reduces_it(tmp_path, group):
    found = _losses(tmp_path, "--amp", "fp16", *group.split())
    assert found[-1] < found[0]


@pytest.mark.parametrize("strategy", ["ddp", "zero", "fsdp"])
def test_a_resumed_run_has_the_same_losses_bit_for_bit(tmp_path, strategy):
    options = ["--single-rank-group", "--strategy", strategy, "--dropout", "0.1"]
    whole = _losses(tmp_path, *options)
    begun = _losses(tmp_path, *options, "--snapshot-dir", "snapshots", "--max-steps", "4")
    resumed = _losses(tmp_path, *options, "--snapshot-dir", "snapshots")
    assert begun + resumed == whole


def test_the_memory_of_a_training_does_not_grow(tmp_path):
    peaks = []
    for steps in ("9", "27"):  # DDP allocates its buckets again in the first steps
        summary = f"{steps}.json"
        succeeded(train(*RUN, "--max-steps", steps, "--summary", summary, "--epochs", "4", cwd=tmp_path))
        peaks.append(json.loads((tmp_path / summary).read_text())["memory"]["peak_bytes"])
    assert peaks[0] == peaks[1]


def test_batches_are_copied_while_kernels_run(tmp_path):
    options = ["--trace-dir", "traces", "--trace-window", "3,1,3,1"]
    # Large samples, so that the copy of the next batch takes as long as a kernel.
    large = ["--src-shape", "64,512", "--tgt-shape", "64,512", "--num-samples", "512", "--batch-size", "64"]
    succeeded(train(*large, "--epochs", "1", "--dropout", "0", *options, cwd=tmp_path, timeout_s=300.0))
    [path] = (tmp_path / "traces").glob("*.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    copies = [event for event in events if "Memcpy HtoD" in event.get("name", "") and event["dur"] > 50]
    assert copies
    overlapping = [
        copy
        for copy in copies
        if any(k["ts"] < copy["ts"] + copy["dur"] and copy["ts"] < k["ts"] + k["dur"] for k in kernels)
    ]
    assert len(overlapping) >= len(copies) // 2
