"""Measures the duration of a collective.

On each rank, an iteration begins when the rank leaves a barrier of all members, and ends when its result is
available. It is measured with the host's clock on a CPU, and between two events on a device. The time of the
slowest rank is used, which therefore includes the delays between ranks that leave the barrier. Clocks of
different ranks are not compared.

nccl-tests measures differently: after a barrier, it launches 20 collectives in a row, waits for the last
one, and divides the time on the host by 20 (`BenchTime` in common.cu). The host launches a collective while
earlier ones run, so its time to launch counts only for the first one. Here, each iteration is measured alone,
because a row also contains the 99th percentile, and the launch is hidden behind a kernel that keeps the
device busy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from ddp_hpc.bench.comm.collectives import Members, Operation

_BUSY_CYCLES = 1_000_000
"""About 0.5 ms at 2 GHz, which should be longer than the launch of a collective. Not yet run on a GPU."""


def time_operation(
    operation: Operation, members: Members, num: int, tick: Callable[[], None]
) -> tuple[list[float], list[float]]:
    """Returns the times of `num` iterations in seconds, on the slowest rank of each and on this rank.

    Collective: every member must call this. `tick` is called before each iteration and is not timed.
    """
    timed = _timed_by_host if members.device.type == "cpu" else _timed_by_device
    taken_s = []
    for _ in range(num):
        tick()
        dist.barrier()
        taken_s.append(timed(operation, members.device))
    slowest = torch.tensor(taken_s, dtype=torch.float32, device=members.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist(), taken_s


def _timed_by_host(operation: Operation, device: torch.device) -> float:
    del device
    begin_s = time.perf_counter()
    operation.run()
    return time.perf_counter() - begin_s


def _timed_by_device(operation: Operation, device: torch.device) -> float:
    begin, end = (torch.Event(device.type, enable_timing=True) for _ in range(2))
    # On an idle device, `begin` would be reached before the host has launched the operation.
    if device.type == "cuda":
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    operation.run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def speeds(taken_s: list[float], num_bytes: int, busbw_factor: float) -> dict[str, float]:
    """Returns the times of a row, and the bandwidths that result from the median time."""
    median_s = statistics.median(taken_s)
    algbw = num_bytes / median_s
    return {
        "median_us": median_s * 1e6,
        "p99_us": float(np.percentile(taken_s, 99)) * 1e6,
        "algbw_bytes_per_s": algbw,
        "busbw_bytes_per_s": algbw * busbw_factor,
    }
