"""The progress of a training in its log, and the clock of its steps."""

import io
import time

import pytest
import torch

from ddp_hpc.training.telemetry.progress import Progress
from ddp_hpc.training.telemetry.step_clock import StepClock


def test_a_cpu_clock_counts_data_within_the_step():
    clock = StepClock(torch.device("cpu"))
    for _ in range(3):
        clock.start_step()
        with clock.data():
            time.sleep(0.02)
        time.sleep(0.01)
        clock.end_step(10)
    times = clock.read()
    assert len(times) == 3
    assert all(0.02 <= data_s <= step_s - 0.01 for data_s, step_s in times)
    assert clock.read() == []
    # 20 samples in the two steps after the first.
    assert clock.samples_per_s() == pytest.approx(20 / sum(step_s for _, step_s in times[1:]))


def test_a_batch_log_gets_plain_lines():
    log = io.StringIO()
    progress = Progress(True, log)
    progress.step(1, 10, "1/1", 2.5, 100.0)
    progress.step(10, 10, "1/1", 2.0, 100.0)
    lines = log.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0] == "epoch 1/1 step 1/10 loss 2.500000 100.0 samples/s eta ?"
    assert lines[1] == "epoch 1/1 step 10/10 loss 2.000000 100.0 samples/s eta 0:00:00"


def test_the_other_ranks_are_silent():
    log = io.StringIO()
    progress = Progress(False, log)
    progress.say("x")
    progress.step(1, 1, "1/1", 1.0, 1.0)
    assert log.getvalue() == ""
