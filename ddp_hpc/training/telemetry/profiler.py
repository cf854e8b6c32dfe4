"""Profiles a window of steps; writes a Chrome trace and a table of key averages per rank."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ddp_hpc.base.atomic_files import partial_file, remove_leftovers
from ddp_hpc.base.errors import RequestError
from ddp_hpc.training.process_group.wait_for_gloo import wait_for_gloo

_WRITER = "trace"
_TABLE_ROWS = 50
_MOST_LISTED = 8


class _Profile(profile):
    """A torch.profiler that does not stop while gloo still writes to its events."""

    def stop_trace(self) -> None:
        """Stops the recording of this process."""
        wait_for_gloo()
        super().stop_trace()


class Trace:
    """Counts the steps of a loop for the profiler. Created by `record_trace`."""

    def __init__(self, profiler: profile | None) -> None:
        self._profiler = profiler
        self.num_steps = 0

    def step(self) -> None:
        """Advances the profiler; call it after every step of the loop."""
        self.num_steps += 1
        if self._profiler is not None:
            self._profiler.step()


@contextmanager
def record_trace(
    directory: Path | None,
    rank: int,
    world_size: int,
    device: torch.device,
    window: tuple[int, ...],
    *,
    ranks: Collection[int] | None = None,
    with_stack: bool,
    with_flops: bool,
) -> Iterator[Trace]:
    """Skips `wait` steps, warms up for `warmup` steps and records `active` steps, `repeat` times.

    `window` is (wait, warmup, active, repeat), the arguments of `torch.profiler.schedule`. Only `ranks`
    record; None: all ranks.

    `directory` then contains `rank00003-of-00008.json.gz`, which can be opened in Perfetto, and
    `rank00003-of-00008.txt`, the key averages by device time; the second cycle adds `-2` to the names.
    Without a directory, nothing is recorded. If a trace cannot be written, it is dropped with a warning, and
    the loop continues.

    Raises:
        RequestError: the directory cannot be created, or the window contains no step.
    """
    if directory is not None and ranks is not None and rank == 0:
        _warn_of_missing(directory, ranks, world_size)
    if directory is None or (ranks is not None and rank not in ranks):
        yield Trace(None)
        return
    wait, warmup, active, repeat = window
    if min(wait, warmup) < 0 or min(active, repeat) < 1:
        raise RequestError(
            f"invalid trace schedule wait={wait}, warmup={warmup}, active={active}, repeat={repeat}: "
            "wait and warmup must be 0 or greater, active and repeat 1 or greater"
        )
    _create_directory(directory, rank)
    files = _TraceFiles(directory / f"rank{rank:05d}-of-{world_size:05d}", device)
    profiler = _Profile(
        activities=_activities(device),
        schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=repeat),
        on_trace_ready=files.write,
        record_shapes=True,
        profile_memory=True,
        with_stack=with_stack,
        with_flops=with_flops,
        acc_events=True,
    )
    yield from _record(profiler, first_step=wait + warmup + 1)
    if not files.num_written and rank == 0:
        _warn(
            f"{directory}: no trace: the loop ended before step {wait + warmup + 1}, the first recorded step"
        )


def _warn_of_missing(directory: Path, ranks: Collection[int], world_size: int) -> None:
    missing = sorted(rank for rank in ranks if not 0 <= rank < world_size)
    if missing:
        listed = ", ".join(map(str, missing[:_MOST_LISTED])) + (
            ", ..." if len(missing) > _MOST_LISTED else ""
        )
        last = "the only rank is 0" if world_size == 1 else f"the ranks are 0 to {world_size - 1}"
        _warn(f"{directory}: no trace of {'ranks' if len(missing) > 1 else 'rank'} {listed}: {last}")


def _create_directory(directory: Path, rank: int) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            remove_leftovers(directory, _WRITER)
    except OSError as error:
        raise RequestError(
            f"{directory}: cannot write traces there ({error.strerror}); choose another directory"
        ) from error


def _record(profiler: profile, first_step: int) -> Iterator[Trace]:
    """Runs the profiler until the generator is closed or the caller's loop has ended."""
    profiler.start()
    trace = Trace(profiler)
    try:
        yield trace
        if trace.num_steps < first_step:
            profiler.on_trace_ready = None  # otherwise the profiler would write a trace without a step
    except BaseException:
        profiler.on_trace_ready = None  # do not delay the error by writing a trace
        raise
    finally:
        profiler.stop()


class _TraceFiles:
    """Writes one trace per recorded cycle; prints a warning for a trace that cannot be written."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path, self._device = path, device
        self.num_written = 0

    def write(self, profiler: profile) -> None:
        """Writes the trace of the cycle that the profiler has just recorded."""
        self.num_written += 1
        suffix = "" if self.num_written == 1 else f"-{self.num_written}"
        path = self._path.with_name(f"{self._path.name}{suffix}")
        try:
            _write(profiler, path, self._device)
        except (OSError, RuntimeError) as error:
            _warn(f"{path}: the trace was not written: {error}")


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)  # noqa: T201


def _activities(device: torch.device) -> list[ProfilerActivity]:
    of_device = {"cuda": [ProfilerActivity.CUDA], "xpu": [ProfilerActivity.XPU]}
    return [ProfilerActivity.CPU, *of_device.get(device.type, [])]


def _write(profiler: profile, path: Path, device: torch.device) -> None:
    """Writes both files, each one completely or not at all.

    Raises:
        OSError: a file cannot be written.
    """
    order = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    table = profiler.key_averages().table(sort_by=order, row_limit=_TABLE_ROWS)
    with partial_file(path.with_name(f"{path.name}.txt"), _WRITER) as partial:
        partial.write_text(table + "\n", encoding="utf-8")
        partial.replace(path.with_name(f"{path.name}.txt"))
    # torch compresses the trace only if its name ends in .gz.
    with partial_file(path, _WRITER) as partial:
        compressed = partial.with_name(f"{partial.name}.json.gz")
        try:
            profiler.export_chrome_trace(str(compressed))
            compressed.replace(path.with_name(f"{path.name}.json.gz"))
        finally:
            compressed.unlink(missing_ok=True)
