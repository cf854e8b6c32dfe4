"""torch.profiler over a window of steps: a compressed Chrome trace and a table of key averages a rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ddp_hpc.errors import RequestError
from ddp_hpc.partial_files import partial_file, remove_leftovers
from ddp_hpc.training.process_group.gloo_threads import wait_for_gloo

_WRITER = "trace"
_TABLE_ROWS = 50


class _Profile(profile):
    """torch.profiler, which is not stopped while gloo still writes to its events."""

    def stop_trace(self) -> None:
        """Ends the recording of this process."""
        wait_for_gloo()
        super().stop_trace()


class Trace:
    """The steps of a loop as the profiler counts them. Made by `traced`."""

    def __init__(self, profiler: profile | None) -> None:
        self._profiler = profiler
        self.num_steps = 0

    def step(self) -> None:
        """A step is over. To be called by every step of the loop."""
        self.num_steps += 1
        if self._profiler is not None:
            self._profiler.step()


@contextmanager
def traced(
    folder: Path | None,
    rank: int,
    world_size: int,
    device: torch.device,
    *,
    wait: int = 1,
    warmup: int = 1,
    active: int = 2,
    repeat: int = 1,
    with_stack: bool = False,
    with_flops: bool = False,
    max_mib: float = 1024.0,
) -> Iterator[Trace]:
    """Records this rank's steps `wait + warmup` to `wait + warmup + active`, `repeat` times over.

    `folder` gets `rank00003-of-00008.json.gz`, which opens in Perfetto, and `rank00003-of-00008.txt`,
    the key averages by device time; those of a second round have `-2` behind the name. None: nothing
    is recorded. A trace that cannot be written, or of more than `max_mib` MiB, is a warning and is not
    kept: the work goes on.

    Raises:
        RequestError: the folder cannot be made, or the window has no step in it.
    """
    if folder is None:
        yield Trace(None)
        return
    if min(wait, warmup) < 0 or min(active, repeat) < 1:
        raise RequestError(
            f"a trace of wait={wait}, warmup={warmup}, active={active}, repeat={repeat}: "
            "wait and warmup have to be 0 or more, active and repeat 1 or more"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            remove_leftovers(folder, _WRITER)
    except OSError as error:
        raise RequestError(f"{folder}: cannot hold traces ({error.strerror}); name another folder") from error
    name = f"rank{rank:05d}-of-{world_size:05d}"
    num_written = 0

    def write(profiler: profile) -> None:
        nonlocal num_written
        num_written += 1
        path = folder / (name if num_written == 1 else f"{name}-{num_written}")
        try:
            _write(profiler, path, device, max_mib)
        except (OSError, RuntimeError) as error:
            print(f"warning: {path}: the trace was not written: {error}", file=sys.stderr)  # noqa: T201

    profiler = _Profile(
        activities=_activities(device),
        schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=repeat),
        on_trace_ready=write,
        record_shapes=True,
        profile_memory=True,
        with_stack=with_stack,
        with_flops=with_flops,
        acc_events=True,
    )
    profiler.start()
    trace = Trace(profiler)
    try:
        yield trace
        if trace.num_steps <= wait + warmup:
            profiler.on_trace_ready = None  # it would write a trace without a step
    except BaseException:
        profiler.on_trace_ready = None  # the others wait to hear of the error
        raise
    finally:
        profiler.stop()
    if not num_written and rank == 0:
        print(  # noqa: T201
            f"warning: {folder}: no trace: the loop ended before step {wait + warmup + 1}, the first that "
            "is recorded",
            file=sys.stderr,
        )


def _activities(device: torch.device) -> list[ProfilerActivity]:
    of_device = {"cuda": [ProfilerActivity.CUDA], "xpu": [ProfilerActivity.XPU]}
    return [ProfilerActivity.CPU, *of_device.get(device.type, [])]


def _write(profiler: profile, path: Path, device: torch.device, max_mib: float) -> None:
    """Both files, each whole or not at all.

    Raises:
        OSError: one cannot be written, or the trace is too large.
    """
    order = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    table = profiler.key_averages().table(sort_by=order, row_limit=_TABLE_ROWS)
    with partial_file(path.with_name(f"{path.name}.txt"), _WRITER) as partial:
        partial.write_text(table + "\n", encoding="utf-8")
        partial.replace(path.with_name(f"{path.name}.txt"))
    # The suffix is what makes torch compress it.
    with partial_file(path, _WRITER) as partial:
        compressed = partial.with_name(f"{partial.name}.json.gz")
        try:
            profiler.export_chrome_trace(str(compressed))
            size_mib = compressed.stat().st_size / 2**20
            if size_mib > max_mib:
                raise OSError(
                    f"it has {size_mib:.1f} MiB, where {max_mib:g} are allowed; record fewer steps or ranks, "
                    "or no stacks, or allow more (--trace-max-mib, max_mib)"
                )
            compressed.replace(path.with_name(f"{path.name}.json.gz"))
        finally:
            compressed.unlink(missing_ok=True)
