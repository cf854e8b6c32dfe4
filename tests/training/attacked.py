"""A slowed-down training for attacks; it ends when the file `over` exists."""

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from ddp_hpc import train
from ddp_hpc.training import step

LAST_STEP = 60
one_step_as_it_is = step.Stepper.one_step


def one_step(self, position, *rest):
    time.sleep(0.02)
    end_s = time.monotonic() + 600
    while position.step == LAST_STEP - 1 and not Path("over").exists():
        if time.monotonic() > end_s:
            sys.exit("nobody came")
        time.sleep(0.1)
    return one_step_as_it_is(self, position, *rest)


step.Stepper.one_step = one_step
train.main()
