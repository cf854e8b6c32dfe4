"""Imported by test programs that use gloo without ddp-hpc, so that they end normally.

A thread of gloo frees the last collective, for which it needs Python's lock. If the thread is late and Python
is shutting down, torch 2.13 aborts the process: "terminate called without an active exception".
"""

import atexit
import time

atexit.register(time.sleep, 0.2)
