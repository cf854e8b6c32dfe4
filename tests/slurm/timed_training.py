"""A training whose parts take known times. Rank 0 appends when each part began and ended to `parts.jsonl`."""

import contextlib
import json
import os
import time
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as in slow_training.py

from ddp_hpc import train
from ddp_hpc.training.run import lifecycle
from ddp_hpc.training.snapshots.snapshot_directory import SnapshotWriter
from ddp_hpc.training.step import Stepper
from ddp_hpc.training.telemetry.step_clock import StepClock

rank = os.environ["SLURM_PROCID"] if "SLURM_PROCID" in os.environ else os.environ["RANK"]
Path(f"pid-{rank}").write_text(str(os.getpid()))


def timed(name, function, seconds):
    def call(*args, **kwargs):
        began_s = time.time()
        time.sleep(seconds)
        try:
            return function(*args, **kwargs)
        finally:
            note(name, began_s)

    return call


def note(name, began_s):
    if rank == "0":
        with Path("parts.jsonl").open("a") as file:
            file.write(json.dumps({"part": name, "began_s": began_s, "ended_s": time.time()}) + "\n")


wait_for_data = StepClock.data


@contextlib.contextmanager
def data(self):
    began_s = time.time()
    with wait_for_data(self):
        yield
        time.sleep(0.1)
    note("data", began_s)


StepClock.data = data
Stepper.one_step = timed("step", Stepper.one_step, 0.3)
SnapshotWriter.save = timed("save", SnapshotWriter.save, 0.7)
lifecycle.restore = timed("restore", lifecycle.restore, 3.0)
train.main()
