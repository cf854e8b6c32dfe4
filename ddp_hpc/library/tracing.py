"""`ddp_hpc.tracing`: records a window of steps of a user's loop with torch.profiler."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.options import read_directory
from ddp_hpc.library.connected_world import active_world
from ddp_hpc.training.telemetry.profiler import Trace, record_trace


@contextmanager
def tracing(
    folder: str | Path | None,
    *,
    wait: int = 1,
    warmup: int = 1,
    active: int = 2,
    repeat: int = 1,
    ranks: Collection[int] | None = None,
    with_stack: bool = False,
    with_flops: bool = False,
) -> Iterator[Trace]:
    """Records steps of a loop with `torch.profiler`: call `trace.step()` after each step.

    It works inside and outside of `with ddp_hpc.distributed()`, for example with the Trainer of a framework.

    The first `wait` steps are skipped, the next `warmup` steps warm up the profiler, and `active` steps
    are recorded; this is repeated `repeat` times. `folder` then contains `rank00003-of-00008.json.gz`,
    which can be opened in Perfetto (https://ui.perfetto.dev), and `rank00003-of-00008.txt`, the key
    averages by device time.

    Args:
        folder: directory for the traces, created if necessary; None: nothing is recorded.
        wait: number of steps to skip.
        warmup: number of steps to warm up.
        active: number of steps to record.
        repeat: number of rounds.
        ranks: ranks that record; None: all.
        with_stack: record Python lines too, which makes steps slower.
        with_flops: estimate the operations of matrix products and convolutions.

    Raises:
        RequestError: the directory cannot be created, or the window contains no step.
    """
    rank, world_size, device = _place()
    what = 'ddp_hpc.tracing(""): the name of the directory'
    directory = None if folder is None else read_directory(what, str(folder))
    with record_trace(
        directory,
        rank,
        world_size,
        device,
        (wait, warmup, active, repeat),
        ranks=ranks,
        with_stack=with_stack,
        with_flops=with_flops,
    ) as trace:
        yield trace


def _place() -> tuple[int, int, torch.device]:
    """Returns rank, world size and device, also in a program without `ddp_hpc.distributed()`."""
    if world := active_world():
        return world.rank, world.world_size, world.device
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size(), device
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise RequestError(
            f"RANK={rank[:20]!r} and WORLD_SIZE={world_size[:20]!r} are not a valid rank and world size; "
            "unset these variables, or start the program with a launcher"
        )
    return int(rank), int(world_size), device
