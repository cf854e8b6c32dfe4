"""How long a collective takes.

An iteration begins on each rank where it leaves a barrier of all members, and ends where its result is
there: on a CPU by the host's clock, on a device between two of its events. The time of the slowest rank
counts, which therefore has in it by how much the ranks leave the barrier one after another. Clocks of
different ranks are not compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from ddp_hpc.bench.comm_collectives import Members, Operation


def time_operation(operation: Operation, members: Members, num: int, tick: Callable[[], None]) -> list[float]:
    """Seconds of `num` iterations on the slowest rank of each. Collective: every member must call this.

    `tick` is called before each, outside of its time.
    """
    timed = _timed_by_host if members.device.type == "cpu" else _timed_by_device
    taken_s = []
    for _ in range(num):
        tick()
        dist.barrier(members.group)
        taken_s.append(timed(operation, members.device))
    slowest = torch.tensor(taken_s, dtype=torch.float32, device=members.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=members.group)
    return slowest.tolist()


def _timed_by_host(operation: Operation, device: torch.device) -> float:
    del device
    begin_s = time.perf_counter()
    operation.run()
    return time.perf_counter() - begin_s


def _timed_by_device(operation: Operation, device: torch.device) -> float:
    begin, end = (torch.Event(device.type, enable_timing=True) for _ in range(2))
    begin.record()
    operation.run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def speeds(taken_s: list[float], num_bytes: int, busbw_factor: float) -> dict[str, float]:
    """A row's times and bandwidths, both of the median iteration."""
    median_s = statistics.median(taken_s)
    algbw = num_bytes / median_s
    return {
        "median_us": median_s * 1e6,
        "p99_us": float(np.percentile(taken_s, 99)) * 1e6,
        "algbw_bytes_per_s": algbw,
        "busbw_bytes_per_s": algbw * busbw_factor,
    }
