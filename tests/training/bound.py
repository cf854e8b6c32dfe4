"""Runs the training on its first CPU only, like `taskset`."""

import os

from ddp_hpc import train


def main(argv: list[str]) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    train.main(argv)
