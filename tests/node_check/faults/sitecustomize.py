"""Gives ranks of a check of nodes the fault FAULT: FAULTY_RANK, or those on FAULTY_HOST.

Python imports this module at its start.
"""

import dataclasses
import os
import signal
import socket
import sys
import time


def is_module(name):
    return name in sys.orig_argv


def hang(*_):
    time.sleep(3600)


def hang_with_the_gil(*_):
    import ctypes

    ctypes.PyDLL(None).sleep(3600)


def be_killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


RANK = next((os.environ[name] for name in ("RANK", "PMI_RANK", "SLURM_PROCID") if name in os.environ), None)
IS_FAULTY = socket.gethostname() == os.environ.get("FAULTY_HOST") or (
    RANK is not None and os.environ.get("FAULTY_RANK") == RANK
)
FAULT = os.environ.get("FAULT") if IS_FAULTY else None
IN_WORKER = {
    "hang": hang,
    "hang with the GIL": hang_with_the_gil,
    "killed": be_killed,
    "wrong product": lambda *_: False,
}
if FAULT in IN_WORKER and is_module("ddp_hpc.node_check.worker"):
    from ddp_hpc.node_check import device

    device.product_is_right = IN_WORKER[FAULT]
elif FAULT is not None and is_module("ddp_hpc.node_check"):
    from ddp_hpc.node_check import rank

    if FAULT == "clock":
        rank.clock_s = lambda: time.time() - 3600
    elif FAULT == "no run directory":
        discover = rank.discover
        rank.discover = lambda *args: dataclasses.replace(discover(*args), local_rank=0)
        os.environ["DDP_HPC_NODE_CHECK"] = "/nonexistent"
    elif FAULT == "does not start":
        hang()
