"""The strategies over NCCL: as many ranks as GPUs, in a world of one where there is one."""

import json

import pytest
import torch

from tests.training.runs import losses, succeeded, train
from tests.training.strategy_rows import EXACT, ROWS, TRAINING

if not torch.cuda.is_available():
    pytest.skip("no CUDA device, as the other file of this folder says", allow_module_level=True)

pytestmark = pytest.mark.gpu
RANKS = 4 if torch.cuda.device_count() >= 4 else min(2, torch.cuda.device_count())
# Of GPU kernels against CPU ones, in float64.
ACROSS_DEVICES = 1e-7


@pytest.mark.parametrize("row", [row for row in ROWS if RANKS == 1 or row.on(RANKS)], ids=lambda r: r.options)
def test_a_strategy_has_the_losses_of_one_cpu_process(row, tmp_path):
    if RANKS == 1 and ("--mesh" in row.options or "--strategy tp" in row.options or "pp" in row.options):
        pytest.skip("a grid needs several GPUs")
    dtype = ["--dtype", "float64"] if row.tolerance == EXACT else []
    size = row.on(RANKS) if RANKS > 1 else 1
    accumulate = 2 if "--accumulate" in row.options else 1
    words = [*TRAINING, *dtype, "--batch-size", str(16 // size // accumulate), *row.options.split()]
    succeeded(train(*words, "--metrics", "gpu.jsonl", "--summary", "s.json", cwd=tmp_path, ranks=RANKS))
    cpu = [*TRAINING, *dtype, "--batch-size", "16", *row.like.split(), "--device", "cpu"]
    succeeded(train(*cpu, "--metrics", "cpu.jsonl", cwd=tmp_path))
    found, expected = losses(tmp_path / "gpu.jsonl"), losses(tmp_path / "cpu.jsonl")
    assert found == pytest.approx(expected, abs=max(row.tolerance, ACROSS_DEVICES))
    summary = json.loads((tmp_path / "s.json").read_text())
    print(row.options, summary["device"], summary["backend"], summary["memory"], summary["samples_per_s"])
