"""Replaces the sleep of the examples: in step SIGNAL_AT, counted from 1, rank 1 sends itself SIGTERM."""

import itertools
import os
import signal
import time

_count = itertools.count(1)


def sleep(seconds: float) -> None:
    time.sleep(seconds)
    if str(next(_count)) == os.environ["SIGNAL_AT"] and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
