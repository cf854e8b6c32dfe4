"""The training on the first of its CPUs alone, as `taskset` would start it."""

import os

from ddp_hpc import train


def main(argv: list[str]) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    train.main(argv)
