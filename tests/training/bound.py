"""Runs the training on its first CPU only, like `taskset`; with LIMIT=SOFT:HARD, with few open files."""

import os
import resource

from ddp_hpc import train


def main(argv: list[str]) -> None:
    if limit := os.environ.get("LIMIT"):
        soft, hard = map(int, limit.split(":"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    else:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    train.main(argv)
