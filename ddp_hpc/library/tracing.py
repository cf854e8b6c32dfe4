"""A window of someone's own loop, recorded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ddp_hpc.errors import RequestError
from ddp_hpc.library.world import current_world
from ddp_hpc.training.tracing import Trace, traced


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
    max_mib: float = 1024,
) -> Iterator[Trace]:
    """The loop's steps as `torch.profiler` sees them: call `trace.step()` after each.

    The first `wait` steps are left out, the next `warmup` warm the profiler up, and `active` ones are
    recorded, `repeat` times over. `folder` then holds `rank00003-of-00008.json.gz`, which opens in
    Perfetto (https://ui.perfetto.dev), and `rank00003-of-00008.txt`, the key averages by device time.

    Args:
        folder: of the traces, made if need be; None: nothing is recorded.
        wait: steps.
        warmup: steps.
        active: steps.
        repeat: rounds.
        ranks: those that record; None: all.
        with_stack: also the Python lines, for which steps take longer.
        with_flops: also an estimate of the operations of matrix products and convolutions.
        max_mib: a rank's trace that is larger is not kept, which is a warning; its table is.

    Raises:
        RequestError: the folder cannot be made, or the window has no step in it.
    """
    world = current_world("ddp_hpc.tracing()")
    if folder == "":  # which would be the current folder
        raise RequestError('ddp_hpc.tracing(""): names no folder: its variable is empty or not set')
    records = folder is not None and (ranks is None or world.rank in ranks)
    with traced(
        Path(folder) if folder is not None and records else None,
        world.rank,
        world.world_size,
        world.device,
        wait=wait,
        warmup=warmup,
        active=active,
        repeat=repeat,
        with_stack=with_stack,
        with_flops=with_flops,
        max_mib=max_mib,
    ) as trace:
        yield trace
