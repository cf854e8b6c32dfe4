"""`python -m benchmarks.gpu`, on a CPU with small models: every part works, and the results are written."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from tests.conftest import PROJECT


@pytest.mark.timeout(400)
def test_all_parts_run_on_a_cpu(launch, tmp_path):
    argv = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--minutes", "6", "--out", tmp_path]
    done = launch(argv, cwd=PROJECT, timeout_s=380.0)
    assert done.exit_code == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert {"floor", "step", "decoder", "snapshots", "comm", "trace", "tests"} < found.keys()
    assert not [name for name, values in found.items() if "skipped" in values and name != "tests"]
    assert found["step"]["ours"]["loss_distance"] == 0.0
    assert found["comm"]["backend"] == "gloo"
    # The tests of tests/gpu are collected, and skip themselves.
    assert found["tests"]["failed"] == []
    assert len(found["tests"]["skipped"]) >= 6
    # Each goal has its value; only those of a tuned step need a GPU.
    missing = [name for name, text in found["goals"].items() if text.startswith("not measured")]
    assert missing == ["tuned step / step of the lesson", "tuned step / its floor"]
    assert "goal: snapshot: pause / copy at 80 % of the PCIe rate: " in done.stdout
    page = (tmp_path / "gpu.md").read_text()
    assert "| ours: vs_lesson | " in page


def test_a_part_without_its_package_is_skipped_and_the_others_run(launch, tmp_path):
    hidden = (
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n: None if n == 'h5py' else f(n)"
    )
    program = f"{hidden}; import sys; from benchmarks import gpu; sys.argv[1:] = {['--device', 'cpu']}"
    program += f" + ['--minutes', '2', '--out', {str(tmp_path)!r}]; gpu.main()"
    done = launch([sys.executable, "-c", program], cwd=PROJECT, timeout_s=150.0)
    assert done.exit_code == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["step"] == {"skipped": "h5py is not installed"}
    assert found["floor"]["matmul_bf16_tflops_per_s"] > 0


def test_a_gpu_that_is_not_there_is_refused_in_one_line(launch, tmp_path):
    done = launch(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "cuda", "--out", tmp_path], cwd=PROJECT
    )
    assert done.exit_code == 2
    assert "finds no GPU; use --device cpu" in done.stderr


def test_a_goal_says_whether_it_is_met_on_a_gpu():
    goal = gpu.Goal("decoder", "part", lambda found: found["rate"], 0.55, is_minimum=True)
    run = gpu.Run(True, Path(), Path())
    assert goal.judge(run) == "not measured (goal: at least 0.55)"
    for rate, text in ((0.5, "0.5, NOT MET (goal: at least 0.55)"), (0.6, "0.6, met (goal: at least 0.55)")):
        run.values = {"part": {"rate": rate}}
        assert goal.judge(run) == text
    run.values = {"part": {"failed": "RuntimeError: a part that failed has no values"}}
    assert goal.judge(run) == "not measured (goal: at least 0.55)"


def test_the_floor_of_a_step_is_the_time_of_its_memory_traffic_where_matrix_products_are_fast():
    rates = {"copy_gb_per_s": 2000.0, "matmul_float32_tflops_per_s": 1e9, "matmul_bf16_tflops_per_s": 1e9}
    floors = gpu._floors(512, rates)
    num = 44_140_544  # the parameters of torch.nn.Transformer()
    assert floors["ours"] == pytest.approx(num * (12 + 28) / 2e12)
    assert floors["ours, tuned"] == pytest.approx(num * (6 + 28) / 2e12)
    assert gpu._floors(512, {}) == {}
