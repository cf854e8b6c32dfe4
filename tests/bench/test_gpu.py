"""`python -m benchmarks.gpu`, on a CPU with small models: every row works, and the results are written."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import rows
from benchmarks.gpu.__main__ import Runner
from benchmarks.gpu.floor import count_products, floor_s
from benchmarks.gpu.page import Goal, Page
from benchmarks.gpu.rows import Row
from tests.gpu import runs as gpu_runs
from tests.training.runs import LINEAR

BENCHMARK = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu"]


def read(out: Path) -> dict[str, dict]:
    return json.loads((out / "gpu.json").read_text())["rows"]


@pytest.mark.check
def test_every_row_has_values_or_needs_a_gpu(launch, tmp_path):
    done = launch([*BENCHMARK, "--minutes", "6", "--out", tmp_path], timeout_s=380.0)
    assert done.exit_code == 0, done.stdout + done.stderr
    found = read(tmp_path)
    assert list(found) == [row.name for row in rows.ROWS]
    skipped = {name: values["skipped"] for name, values in found.items() if "skipped" in values}
    assert set(skipped.values()) == {"needs a GPU"}
    assert {"rates", "loop: ours", "snapshots", "decoder", "trace", "comm"}.isdisjoint(skipped)
    assert found["loop: ours"]["loss_off_by"] == 0.0
    assert found["snapshots"]["saves"] == 2
    assert found["comm"]["backend"] == "gloo"
    # The GPU tests are collected, and skip themselves.
    assert (found["tests: gpu"]["num_skipped"], found["tests: gpu"]["num_failed"]) == (1, 0)
    assert list((tmp_path / "traces").glob("*.json.gz"))
    text = (tmp_path / "gpu.md").read_text()
    assert "| snapshot: pause / copy at 80 % of the PCIe rate | " in text
    assert "| tuned step / step of the lesson |  | at most 0.25 | needs a GPU |" in text


@pytest.mark.check
@pytest.mark.parametrize("how", ["forks", pytest.param("processes", marks=pytest.mark.soak)])
def test_a_row_that_fails_crashes_or_hangs_does_not_end_the_others(launch, tmp_path, how):
    argv = [sys.executable, "-m", "tests.bench.broken_rows", tmp_path, how]
    done = launch(argv, timeout_s=240.0)
    assert done.exit_code == 0, done.stdout + done.stderr
    found = read(tmp_path)
    assert found["raises"]["failed"] == "ValueError: what was wrong"
    assert "in raises" in (tmp_path / found["raises"]["log"]).read_text()
    assert found["raises"]["before"] == 1
    assert found["refused"]["failed"].startswith("error: --cuda-graph needs a CUDA device")
    assert "SIGSEGV" in found["crashes"]["failed"]
    assert found["hangs"]["failed"].startswith("stopped after ")
    assert found["works"]["value"] == 2
    # At the end of --minutes, nothing has failed.
    assert found["is stopped"].keys() == {"stopped", "seconds"}
    assert found["is not reached"] == {"skipped": "not measured: the time limit was used up"}
    assert "**FAILED**: ValueError: what was wrong (log: raises.log)" in (tmp_path / "gpu.md").read_text()
    # The tests so far are reported, a test that hangs is ended, and the next ones run.
    tests = found["tests"]
    assert tests["failures"] == {
        "test_fails": "assert 1 == 2",
        "test_hangs": "benchmarks.gpu.run_tests.TestLimitError: the test takes longer than 2 s",
    }
    assert tests["num_failed"] == 2
    assert 2 < tests["num_passed"] < tests["tests"] == 64
    assert tests["stopped"].startswith("stopped after ")
    assert "test_fails" in (tmp_path / tests["log"]).read_text()
    # Processes of rows and of tests do not remain.
    assert not subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout


def test_the_gpu_tests_start_trainings_as_forks_where_cuda_allows_it(forks, tmp_path, monkeypatch, no_gpu):
    assert not gpu_runs._can_use_cuda(forks)
    monkeypatch.setattr(gpu_runs, "_forks", lambda: forks)
    options = [*LINEAR, "--device", "cpu", "--num-samples", "64", "--epochs", "1"]
    assert len(gpu_runs.trained_losses(*options, cwd=tmp_path)) == 2
    refused = gpu_runs.train(*options, "--cuda-graph", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--cuda-graph needs a CUDA device" in refused.stderr


@pytest.mark.check
def test_a_gpu_that_is_not_there_is_refused_in_one_line(launch, tmp_path, no_gpu):
    done = launch([*BENCHMARK, "--device", "cuda", "--out", tmp_path], timeout_s=90.0)
    assert done.exit_code == 2
    assert "finds no GPU (" in done.stderr
    assert "; use --device cpu" in done.stderr


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({}, ("", "at least 0.55", "not measured")),
        (
            {"a": {"failed": "ValueError: no values"}},
            ("", "at least 0.55", "not measured"),
        ),
        ({"a": {"rate": 0.5}}, ("0.5", "at least 0.55", "NOT MET")),
        ({"a": {"rate": 0.5}, "b": {"rate": 0.6}}, ("0.6", "at least 0.55", "met")),
    ],
)
def test_a_goal_is_judged_by_the_best_row(values, verdict):
    goal = Goal("decoder", ("a", "b"), "rate", 0.55, is_minimum=True)
    assert goal.judge(values, is_gpu=True) == verdict
    assert goal.judge(values, is_gpu=False)[2] == "needs a GPU"


def test_a_row_without_its_package_is_skipped(tmp_path):
    page = Page(tmp_path, "a test", {"machine": {"num_gpus": 1}})
    runner = Runner(page, tmp_path, time.monotonic() + 100, None)
    assert runner.run(Row("a", print, packages=("no_such_package",)), "cpu") == {
        "skipped": "no_such_package is not installed"
    }
    assert runner.run(Row("b", print, num_gpus=2), "cpu") == {"skipped": "needs 2 GPUs"}
    assert "| a | no_such_package is not installed | 0 |" in (tmp_path / "gpu.md").read_text()


def test_the_lessons_model_needs_196_matrix_products_per_step():
    products, _, num_parameters = count_products(512)
    assert (len(products), num_parameters) == (196, 44_140_544)


@pytest.mark.check
def test_the_floor_of_a_step_counts_bytes_multiplications_and_kernels():
    num = 44_140_544
    fast = {"copy_gb_per_s": 1e9, "float32_tflops_per_s": 1e9, "bf16_tflops_per_s": 1e9, "product_us": 0.0}
    assert floor_s(512, {**fast, "product_us": 4.0}, is_half=True) == pytest.approx(196 * 4e-6, rel=1e-3)
    slow = {**fast, "float32_tflops_per_s": 50.0}
    assert floor_s(512, slow, is_half=False) == pytest.approx(88.2e9 / 50e12, rel=1e-2)
    adam_s = num * 28 / 2e12
    assert adam_s < floor_s(512, {**fast, "copy_gb_per_s": 2000.0}, is_half=True) < 2 * adam_s
    assert floor_s(512, {}, is_half=True) is None
