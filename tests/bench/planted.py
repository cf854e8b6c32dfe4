"""`python -m tests.bench.planted FAULT OPTIONS...` runs `ddp-hpc bench comm` with a planted fault.

The fault is in torch.distributed or in the environment, and not in the program under test.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddp_hpc.discovery.launcher_environment import peek_rank

# The functions of torch 2.13, and those of earlier versions.
NAMES = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
}
LEAST = 100  # minimum number of elements in the benchmark's data


def wrap(name: str, fault: Callable[[torch.Tensor, int], None]) -> None:
    """Applies `fault(result, number of the call)` to the result of every call of a collective on data."""
    name = next(one for one in NAMES.get(name, (name,)) if hasattr(dist, one))
    real = getattr(dist, name)
    calls = 0

    def wrapped(result: torch.Tensor, *args: Any, **options: Any) -> Any:
        nonlocal calls
        done = real(result, *args, **options)
        if result.numel() >= LEAST and result.dtype is torch.float32:
            calls += 1
            fault(result, calls)
        return done

    setattr(dist, name, wrapped)


def flip(result: torch.Tensor, _: int) -> None:
    """Increases one element by one."""
    result[7] += 1


def swap(result: torch.Tensor, _: int) -> None:
    """Swaps the blocks of ranks 1 and 2 of four."""
    blocks = result.view(4, -1)
    blocks[[1, 2]] = blocks[[2, 1]]


def late(result: torch.Tensor, call: int) -> None:
    """Changes only the last calls, after the first check of the result."""
    if call > 3:
        result[0] = 0


def stop(_: torch.Tensor, call: int) -> None:
    if call == 4:
        os.kill(os.getpid(), signal.SIGSTOP)


def kill(_: torch.Tensor, call: int) -> None:
    if call == 4:
        os.kill(os.getpid(), signal.SIGKILL)


def refuse(_: torch.Tensor, __: int) -> None:
    raise RuntimeError("ProcessGroupGloo does not support this\nException raised from somewhere")


FAULTS = {f.__name__: f for f in (flip, swap, late, stop, kill, refuse)}


def two_nodes(rank: int) -> None:
    """Sets the environment so that ranks 0 and 1 are on one node and the others on a second one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)
    place = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_SIZE": 2, "NODE_RANK": rank // 2}
    os.environ.update({f"DDP_HPC_{name}": str(value) for name, value in place.items()})


def main(argv: list[str]) -> None:
    """Runs with FAULT `none`, `two_nodes`, or a fault of a rank's collective, such as flip:all_reduce:2."""
    fault, *options = argv
    rank = peek_rank(os.environ)
    if fault == "two_nodes":
        two_nodes(rank)
    elif fault != "none":
        name, collective, where = fault.split(":")
        if where in ("all", str(rank)):
            wrap(collective, FAULTS[name])
    from ddp_hpc import cli

    sys.argv = ["ddp-hpc", "bench", "comm", *options]
    try:
        cli.main()
    except SystemExit as end:
        sys.exit(end.code or 0)


if __name__ == "__main__":
    main(sys.argv[1:])
