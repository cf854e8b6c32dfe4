"""Where the metrics of the steps go: the --metrics file, and a function of the user."""

import contextlib
import dataclasses
import json
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.training.telemetry import metric_sinks
from ddp_hpc.training.telemetry.config import TelemetryConfig
from ddp_hpc.training.telemetry.metric_sinks import open_sinks
from ddp_hpc.training.telemetry.metrics_file import MetricsFile, StepRecord, check_outputs

from .runs import records

HOOK = """
from torch import nn

seen = []


def net():
    return nn.Linear(20, 1)


def hook(record):
    seen.append(record["step"])
    if record["step"] == 3:
        raise ValueError("no route")
"""
WORDS = ["--src-shape", "20", "--tgt-shape", "1", "--num-samples", "96", "--batch-size", "4", "--epochs", "1"]


def _record(step):
    return StepRecord(step=step, epoch=1, loss=1.0, lr=0.1, samples=1, data_s=0.0, step_s=0.1)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(HOOK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


def _open(rank=0, **options):
    group = SimpleNamespace(world=SimpleNamespace(rank=rank), failing_together=contextlib.nullcontext)
    return open_sinks(TelemetryConfig(**options), group, 0)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The environment of the first attempt in a job, and the time."""
    monkeypatch.setenv("DDP_HPC_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("DDP_HPC_THIS_ATTEMPT", "1 7")
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(metric_sinks.time, "monotonic", lambda: clock.now_s)
    return clock


def _timeline(run_dir):
    return [json.loads(line) for line in (run_dir / "timeline").read_text().splitlines()]


def test_the_run_directory_of_a_job_gets_the_mean_loss_of_some_steps(job, tmp_path):
    (sink,) = _open()
    sink.write([_record(1), _record(2)])
    assert not (tmp_path / "timeline").exists()
    job.now_s = 1.0
    sink.write([dataclasses.replace(_record(3), loss=4.0, data_s=0.05)])
    (line,) = _timeline(tmp_path)
    del line["at_s"]
    assert line == {
        "attempt": "1 7", "moment": "steps", "step": 3, "loss": 2.0, "num_steps": 3,
        "steps_s": pytest.approx(0.3), "data_s": 0.05,
    }  # fmt: skip
    sink.write([_record(4)])
    sink.close()
    sink.close()
    assert [line["num_steps"] for line in _timeline(tmp_path)] == [3, 1]


def test_a_loss_that_is_not_finite_is_unknown_in_the_run_directory(job, tmp_path):
    (sink,) = _open()
    sink.write([dataclasses.replace(_record(1), loss=float("nan"))])
    sink.close()
    assert [line["loss"] for line in _timeline(tmp_path)] == [None]


def test_an_attempt_of_two_days_writes_few_lines_to_the_run_directory(job, tmp_path):
    (sink,) = _open()
    for job.now_s in range(0, 2 * 24 * 3600, 10):
        sink.write([_record(job.now_s + 1)])
    assert 300 < len(_timeline(tmp_path)) < 600


def test_only_rank_0_writes_metrics(mine):
    metrics = mine / "m.jsonl"
    assert _open(rank=1, metrics=metrics, metrics_hook="mine:hook") == []
    assert not metrics.exists()
    for sink in _open(metrics=metrics, metrics_hook="mine:hook"):
        sink.write([_record(1), _record(2)])
        sink.close()
    assert [record["step"] for record in records(metrics)] == [1, 2]
    assert sys.modules["mine"].seen == [1, 2]


def test_a_hook_that_raises_is_only_a_warning(mine, capsys):
    (hook,) = _open(metrics_hook="mine:hook")
    hook.write([_record(step) for step in range(1, 6)])
    assert sys.modules["mine"].seen == [1, 2, 3]
    assert capsys.readouterr().err.count("warning: --metrics-hook mine:hook raised ValueError: no route") == 1


def test_a_missing_hook_is_an_error_before_the_metrics_file_is_truncated(mine):
    (mine / "m.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RequestError, match=r"--metrics-hook mine:hok: .*\(did you mean \"hook\"\?\)"):
        _open(metrics=mine / "m.jsonl", metrics_hook="mine:hok")
    assert (mine / "m.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("before", ["", "requeue 12 the walltime\n"])
def test_a_refused_start_does_not_change_the_state_of_the_run(mine, forks, before):
    run = mine / "run"
    run.mkdir()
    if before:
        (run / "state").write_text(before)
    env = {"DDP_HPC_RUN_DIR": str(run), "DDP_HPC_THIS_ATTEMPT": "2 7"}
    words = [*WORDS, "--metrics-hook", "mine:hok", "--model", "mine:net"]
    assert forks.start(*words, cwd=mine, ranks=2, env=env).wait() == [2, 2]
    assert ((run / "state").read_text() if before else (run / "state").exists()) == (before or False)
    end = json.loads((run / "end").read_text())
    assert (end["attempt"], end["cause"], end["exit_code"]) == ("2 7", "refused", 2)
    assert "did you mean" in end["reason"]


def test_unwritable_outputs_are_detected_before_the_training(tmp_path):
    (tmp_path / "file").write_text("")
    assert check_outputs({"--metrics": None, "--summary": tmp_path / "new" / "s.json"}, None) == ""
    assert not (tmp_path / "new").exists()
    for path in (tmp_path, tmp_path / "file" / "s.json"):
        assert f"--summary {path}: cannot be written" in check_outputs({"--summary": path}, None)


def test_no_output_overwrites_the_data_or_a_file_other_than_json(tmp_path):
    data, old, notes = (tmp_path / name for name in ("train.h5", "old.json", "notes.txt"))
    data.write_bytes(b"\x89HDF\r\n")
    old.write_text('{"steps": 1}\n')
    notes.write_text("mine")
    assert "is the data" in check_outputs({"--metrics": data}, data)
    assert "is not JSON" in check_outputs({"--summary": notes}, data)
    assert "the same file" in check_outputs({"--metrics": old, "--summary": old}, data)
    assert check_outputs({"--metrics": old, "--summary": tmp_path / "new.json"}, data) == ""
    assert (data.read_bytes(), notes.read_text()) == (b"\x89HDF\r\n", "mine")


def test_a_full_disk_for_the_metrics_is_a_warning(capsys):
    metrics = MetricsFile(Path("/dev/full"))
    for step in (1, 2, 3):
        metrics.write([_record(step)])
    metrics.close()
    first, last = capsys.readouterr().err.splitlines()
    assert first == (
        "warning: --metrics /dev/full: cannot be written (No space left on device); ddp-hpc keeps up to "
        "100,000 lines, and tries again after the next steps"
    )
    assert last.endswith("cannot be written (No space left on device); the last steps are missing")


def _fill_disk(path):
    with suppress(OSError), path.open("wb", buffering=0) as filled:
        while True:
            filled.write(bytes(4096))


def test_the_metrics_are_complete_when_there_is_space_again(tiny_disk, capsys):
    path, others = tiny_disk / "m.jsonl", tiny_disk / "others.bin"
    metrics = MetricsFile(path)
    metrics.write(
        [_record(step) for step in range(1, 31)]
    )  # almost a block, so that a line is cut at its end
    _fill_disk(others)
    for step in range(31, 71):
        metrics.write([_record(step)])
    others.unlink()
    metrics.write([_record(71)])
    metrics.close()
    written = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    first, last = capsys.readouterr().err.splitlines()
    assert "cannot be written (No space left on device)" in first
    assert written == list(range(1, 72))
    assert last.endswith("can be written again")


def test_the_summary_contains_flops_and_memory(mine, forks):
    forks.run(*WORDS, "--model", "mine:net", "--summary", "s.json", cwd=mine, ranks=1)
    summary = json.loads((mine / "s.json").read_text())
    # Two operations per weight in the forward pass and two for its gradient; none for that of the input.
    assert summary["flops_per_s"] == pytest.approx(80 * summary["samples_per_s"])
    assert summary["tokens_per_s"] is None, "a scalar target is not a sequence"
    assert summary["share_of_peak"] is None, "the peak of a CPU is unknown"
    # Parameters, gradients and two states of Adam, each 21 numbers, and two counts of steps.
    assert summary["memory"]["state_bytes"] == 4 * (4 * 21 + 2)
    assert summary["memory"]["peak_bytes"] > 2**20
