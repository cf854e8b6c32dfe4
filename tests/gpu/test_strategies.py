"""The parallel strategies over NCCL, with one rank per GPU; a single GPU is a world of one rank."""

import json

import pytest
import torch

from tests.gpu.runs import reference_losses, train
from tests.training.runs import error_lines, losses, succeeded
from tests.training.strategy_rows import DATA, EXACT, ROWS, TRAINING, Row

if not torch.cuda.is_available():
    pytest.skip("no CUDA device (see tests/gpu/test_gpu.py)", allow_module_level=True)

pytestmark = pytest.mark.gpu
SHORT = [*TRAINING, "--num-samples", "150"]
RANKS = 4 if torch.cuda.device_count() >= 4 else min(2, torch.cuda.device_count())
# Tolerance between GPU and CPU kernels in float64.
ACROSS_DEVICES = 1e-7
# Cases that differ only on GPUs.
OF_A_GPU = [
    Row("--no-fused", DATA),
    Row("--workers 2", DATA),
    Row("--compile reduce-overhead", DATA),
    Row("--strategy fsdp --cpu-offload --clip-norm 0.5 --check-gradients", DATA, like="--clip-norm 0.5"),
    Row("--strategy fsdp --no-fused", DATA),
]


CASES = [row for row in ROWS + OF_A_GPU if RANKS == 1 or row.on(RANKS)]


# Compiling takes longest, and comes last because benchmarks/gpu limits the time of all tests.
@pytest.mark.parametrize(
    "row", sorted(CASES, key=lambda row: "--compile" in row.options), ids=lambda r: r.options
)
def test_a_strategy_has_the_losses_of_one_cpu_process(row, tmp_path):
    if RANKS == 1 and ("--mesh" in row.options or "--strategy tp" in row.options or "pp" in row.options):
        pytest.skip("a grid needs several GPUs")
    if "--devices-per-rank 2" in row.options and torch.cuda.device_count() < 2 * RANKS:
        done = train(*SHORT, *row.options.split(), cwd=tmp_path, ranks=RANKS)
        assert done.returncode == 2
        assert len(error_lines(done)) == 1
        return
    dtype = ["--dtype", "float64"] if row.tolerance == EXACT else []
    size = row.on(RANKS) if RANKS > 1 else 1
    accumulate = 2 if "--accumulate" in row.options else 1
    words = [*SHORT, *dtype, "--batch-size", str(16 // size // accumulate), *row.options.split()]
    if RANKS == 1 and "dataparallel" not in row.options:
        words.append("--single-rank-group")
    succeeded(train(*words, "--metrics", "gpu.jsonl", "--summary", "s.json", cwd=tmp_path, ranks=RANKS))
    cpu = [*SHORT, *dtype, "--batch-size", "16", *row.like.split(), "--device", "cpu"]
    found, expected = losses(tmp_path / "gpu.jsonl"), reference_losses(*cpu)
    assert found == pytest.approx(expected, abs=max(row.tolerance, ACROSS_DEVICES))
    summary = json.loads((tmp_path / "s.json").read_text())
    print(row.options, summary["device"], summary["backend"], summary["memory"], summary["samples_per_s"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a replica on two devices needs two GPUs")
def test_replicas_on_two_devices_each_average_the_gradients_of_both_over_nccl(tmp_path):
    # With as many ranks as above, most machines have too few GPUs for this option. Never run.
    ranks = min(2, torch.cuda.device_count() // 2)
    words = [*SHORT, "--dtype", "float64", "--batch-size", str(16 // ranks), "--devices-per-rank", "2"]
    words += ["--single-rank-group"] if ranks == 1 else []
    succeeded(train(*words, "--metrics", "gpu.jsonl", cwd=tmp_path, ranks=ranks))
    cpu = [*SHORT, "--dtype", "float64", "--batch-size", "16", "--device", "cpu"]
    found, expected = losses(tmp_path / "gpu.jsonl"), reference_losses(*cpu)
    assert found == pytest.approx(expected, abs=ACROSS_DEVICES)
