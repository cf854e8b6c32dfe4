"""The training with a fault planted in one rank at one step: `PLANT=raise:1` raises in rank 1."""

import os
import signal
import time

from ddp_hpc import train
from ddp_hpc.training import trainer

kind, _, rank = os.environ["PLANT"].partition(":")
step_as_it_is = trainer._Run.one_step


def one_step(self, step, *rest):
    if step == 1 and self.group.world.rank == int(rank):
        if kind == "raise":
            raise ValueError("planted in one rank")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "interrupt":
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(30)
        if kind == "stick":
            time.sleep(600)
    return step_as_it_is(self, step, *rest)


trainer._Run.one_step = one_step
train.main()
