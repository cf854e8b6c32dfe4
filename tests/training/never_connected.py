"""Runs `ddp_hpc.train` with a fault before the first step: `CONNECT_FAULT=KIND:RANK`.

The other ranks really wait in gloo's `init_process_group`, whose own time limit is --timeout.
"""

import os
import signal
import time

import torch.distributed as dist

from ddp_hpc.train import main
from ddp_hpc.training import session, task_setup

session.AFTER_PARTS_S = 3.0


def never_connects(*_: object, **__: object) -> None:
    time.sleep(600)


def is_killed(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def reads_a_dead_file_system(*_: object, **__: object) -> None:
    time.sleep(600)


if __name__ == "__main__":
    kind, _, rank = os.environ["CONNECT_FAULT"].partition(":")
    if rank in (os.environ["RANK"], "all"):
        match kind:
            case "hang":
                dist.init_process_group = never_connects
            case "kill":
                dist.init_process_group = is_killed
            case "data":
                task_setup.set_up = reads_a_dead_file_system  # type: ignore[assignment]
    main()
