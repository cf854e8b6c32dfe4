"""The traces of a folder: found, read in parallel, and those of one run kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.trace.model import RankTrace
from ddp_hpc.trace.rank import read_rank

_SUFFIXES = (".json", ".json.gz")
_SMALL_BYTES = 4 << 20
"""Read sooner than processes are started."""
_SAME_RUN_S = 300.0
"""Windows of one run lie no further apart than this, whatever the clocks of its hosts say."""


def trace_files(path: Path) -> tuple[Path, ...]:
    """The files that may be traces: `path` itself, or those of the folder, by name.

    Raises:
        RequestError: there are none.
    """
    if path.is_file():
        return (path,)
    if not path.is_dir():
        raise RequestError(f"{path}: no such folder; name the one that --trace-dir wrote, or a trace file")
    files = tuple(sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES) and file.is_file()))
    if not files:
        deeper = next(
            (file for suffix in _SUFFIXES for file in path.rglob(f"*{suffix}") if file.is_file()), None
        )
        hint = f"; there are some in {deeper.parent}" if deeper else ""
        raise RequestError(f"{path}: no traces (*.json or *.json.gz) in this folder{hint}")
    return files


def read_ranks(
    files: Sequence[Path], num_processes: int | None = None, seen: Callable[[Path], None] = lambda _: None
) -> tuple[tuple[RankTrace, ...], tuple[str, ...]]:
    """A trace for each rank of one run, by rank, and sentences about what was left out.

    `seen` hears of each file that was read.

    Raises:
        RequestError: there is nothing that can be measured.
        DdpHpcError: a file cannot be read, or a reading process was killed.
    """
    traces, notes = [], []
    for file, trace in _read_all(files, num_processes or len(os.sched_getaffinity(0))):
        seen(file)
        if isinstance(trace, str):
            notes.append(f"{file.name}: left out: {trace}")
        elif not trace.steps:
            notes.append(f"{file.name}: left out: {'; '.join(trace.notes)}")
        else:
            traces.append(trace)
    if not traces:
        raise RequestError(
            f"{files[0] if len(files) == 1 else files[0].parent}: nothing can be measured; "
            + (notes[0] if len(notes) == 1 else f"of {len(files)} files none, such as {notes[0]}")
        )
    kept, left_out = _one_run(traces)
    return kept, tuple(sorted(notes) + left_out)


def _read_all(files: Sequence[Path], num_processes: int) -> Iterator[tuple[Path, RankTrace | str]]:
    if min(num_processes, len(files)) == 1 or sum(file.stat().st_size for file in files) < _SMALL_BYTES:
        for file in files:
            yield file, _read(file)
        return
    # The largest first, as the last to be begun decides when all are done.
    ordered = sorted(files, key=lambda file: -file.stat().st_size)
    with _pool(min(num_processes, len(files))) as pool:
        # The readers are begun by the first of these, and keep the mask: Ctrl-C is for the one who waits.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        futures: dict[Future[RankTrace | str], Path] = {pool.submit(_read, f): f for f in ordered}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for future in as_completed(futures):
            try:
                yield futures.pop(future), future.result()
            except BrokenProcessPool as error:
                raise DdpHpcError(
                    "a process that read traces was killed, mostly for lack of memory; "
                    "read fewer at once: --processes 1"
                ) from error


def _read(file: Path) -> RankTrace | str:
    """The trace, or why there is none: one file of hundreds is no reason to give up."""
    try:
        return read_rank(file)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"it cannot be measured ({type(error).__name__}: {error})"


@contextmanager
def _pool(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    pool = ProcessPoolExecutor(num_processes, get_context("fork"))
    try:
        yield pool
    except BaseException:
        for process in (pool._processes or {}).values():
            process.kill()  # Ctrl-C does not wait for gigabytes to be read
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _one_run(traces: list[RankTrace]) -> tuple[tuple[RankTrace, ...], list[str]]:
    """One trace a rank, of the run with the most ranks, the newest of equals."""
    runs = _runs(traces)
    run = max(runs, key=lambda run: (len({trace.rank for trace in run}), run[0].steps[0].start_s))
    notes = [
        f"{Path(trace.path).name}: left out: of another run, of {trace.world_size or 'unknown'} ranks "
        f"{abs(trace.steps[0].start_s - run[0].steps[0].start_s):.0f} s away"
        for other in runs
        if other is not run
        for trace in other
    ]
    of_rank: dict[int, RankTrace] = {}
    for trace in sorted(run, key=lambda trace: (trace.rank < 0, trace.steps[0].start_s, trace.path)):
        name = Path(trace.path).name
        rank = trace.rank
        if rank < 0:
            rank = max(of_rank, default=-1) + 1
            notes.append(f"{name}: names no rank: taken for rank {rank}")
        if rank in of_rank:
            notes.append(
                f"{name}: left out: rank {rank} has {Path(of_rank[rank].path).name}, of the same run, already"
            )
        else:
            of_rank[rank] = replace(trace, rank=rank)
            notes += [f"{name}: {note}" for note in trace.notes]
    return tuple(of_rank[rank] for rank in sorted(of_rank)), notes


def _runs(traces: list[RankTrace]) -> list[list[RankTrace]]:
    """Traces of the same size whose windows are near each other."""
    runs: list[list[RankTrace]] = []
    for trace in sorted(traces, key=lambda trace: (trace.world_size, trace.steps[0].start_s)):
        last = runs[-1][-1] if runs else None
        if (
            last is None
            or last.world_size != trace.world_size
            or trace.steps[0].start_s - last.steps[0].start_s > _SAME_RUN_S
        ):
            runs.append([])
        runs[-1].append(trace)
    return runs
