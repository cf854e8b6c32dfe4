"""Replaces the sleep of the examples: in step SIGNAL_AT, counted from 1, rank 1 sends itself SIGTERM."""

import itertools
import os
import signal
import time

import tests.gloo_exit  # noqa: F401 - for the examples that do not use ddp-hpc
from ddp_hpc.discovery.launcher_environment import peek_rank
from ddp_hpc.training.run import stop_protocol

# Ranks exchange requests after each step, so that the run stops after the step with the signal.
stop_protocol.EXCHANGE_S = 0.0
_count = itertools.count(1)


def sleep(seconds: float) -> None:
    time.sleep(seconds)
    if str(next(_count)) == os.environ["SIGNAL_AT"] and peek_rank(os.environ) == 1:
        os.kill(os.getpid(), signal.SIGTERM)
