"""A training whose steps sleep for `STEP_S` seconds. The file `pid-RANK` contains the process ID."""

import os
import time
from pathlib import Path

# Like train.py, which does this before it imports torch; this script imports torch earlier.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from ddp_hpc import train
from ddp_hpc.training import step

one_step_as_it_is = step.Stepper.one_step


def one_step(self, *where):
    time.sleep(float(os.environ["STEP_S"]))
    return one_step_as_it_is(self, *where)


step.Stepper.one_step = one_step
rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
Path(f"pid-{rank}").write_text(str(os.getpid()))
train.main()
