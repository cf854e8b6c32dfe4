"""Finds the trace files in a directory, reads them in parallel, and selects those of one run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import click

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.text_table import printable
from ddp_hpc.trace.analysis_results import RankTrace
from ddp_hpc.trace.analyze_rank import read_rank

_SUFFIXES = (".json", ".json.gz")
_SMALL_BYTES = 4 << 20
"""Traces below this total size are read faster than processes can be started."""
_MOST_NAMED, _LEAST_NAMED = 30_000, 1000
"""Limits of the kernels, and of the operators, that the timeline shows by name: of all ranks, and of one."""
_MOST_SHOWN = 8
_SAME_RUN_S = 300.0
"""Limit for the time between the recordings of one run, including differences between clocks."""


def trace_files(path: Path) -> tuple[Path, ...]:
    """Returns `path` itself if it is a file, or the possible trace files in the directory, sorted by name.

    Raises:
        RequestError: there are no such files.
    """
    if path.is_file():
        return (path,)
    if not path.is_dir():
        raise RequestError(
            f"no such directory: {path}; give the directory that was the --trace-dir of the training, or a "
            "trace file"
        )
    files = tuple(sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES) and file.is_file()))
    if not files:
        deeper = next(
            (file for suffix in _SUFFIXES for file in path.rglob(f"*{suffix}") if file.is_file()), None
        )
        hint = (
            printable(f"; found some in {deeper.parent}")
            if deeper
            else "; give the --trace-dir of a training"
        )
        raise RequestError(f"no traces (*.json or *.json.gz) in {path}{hint}")
    return files


def read_ranks(
    path: Path, num_processes: int | None = None
) -> tuple[tuple[RankTrace, ...], list[str], list[str]]:
    """Reads the traces of one run, with a progress bar on a terminal.

    Returns one trace per rank in the order of ranks, notes on what was skipped, and a warning if the ends of
    files are missing, including those that could not be used.

    Raises:
        RequestError: there are no traces, or none of them can be used.
        DdpHpcError: a file cannot be read, or a reading process was killed.
    """
    files = trace_files(path)
    traces, notes, empty = [], [], []
    read = _read_all(files, num_processes or len(os.sched_getaffinity(0)))
    is_hidden = not sys.stderr.isatty()
    with click.progressbar(read, len(files), "reading traces", file=sys.stderr, hidden=is_hidden) as found:
        for file, trace in found:
            if isinstance(trace, str):
                notes.append(f"{file.name}: skipped: {trace}")
            elif not trace.steps:
                notes.append(f"{file.name}: skipped: {'; '.join(trace.notes)}")
                empty.append(trace)
            else:
                traces.append(trace)
    if not traces:
        first = notes[0] if len(notes) == 1 else f"all {len(files)} files were skipped, such as {notes[0]}"
        where = files[0] if len(files) == 1 else path
        raise RequestError(printable(f"{where}: no usable trace; {first}"))
    kept, skipped = _one_run(traces)
    return kept, sorted(notes) + skipped, _warnings([*kept, *empty])


def _warnings(traces: Sequence[RankTrace]) -> list[str]:
    names = sorted(Path(trace.path).name for trace in traces if trace.is_cut_off)
    of = f"{first_of(names)} ({len(names)} of {len(traces)} traces)"
    return [f"Warning: cut off, so that the times after the cut are missing: {of}."] if names else []


def first_of(items: Sequence[object]) -> str:
    """Returns the first items as text, and the number of the others."""
    num_others = len(items) - _MOST_SHOWN
    return ", ".join(map(str, items[:_MOST_SHOWN])) + (f" and {num_others:,} more" if num_others > 0 else "")


def _read_all(files: Sequence[Path], num_processes: int) -> Iterator[tuple[Path, RankTrace | str]]:
    most = max(_LEAST_NAMED, _MOST_NAMED // len(files))
    if min(num_processes, len(files)) == 1 or sum(file.stat().st_size for file in files) < _SMALL_BYTES:
        for file in files:
            yield file, _read(file, most)
        return
    # The largest files come first, because a large file at the end would delay the result.
    ordered = sorted(files, key=lambda file: -file.stat().st_size)
    pool = ProcessPoolExecutor(min(num_processes, len(files)), get_context("fork"))
    try:
        # submit() starts the readers, which inherit this signal mask, so that only the parent handles Ctrl-C.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        futures: dict[Future[RankTrace | str], Path] = {pool.submit(_read, f, most): f for f in ordered}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for future in as_completed(futures):
            try:
                yield futures.pop(future), future.result()
            except BrokenProcessPool as error:
                raise DdpHpcError(
                    "a process that reads traces was killed, probably because of insufficient memory; "
                    "use --processes 1 to read one file at a time"
                ) from error
    except BaseException:
        for process in (pool._processes or {}).values():
            process.kill()  # on Ctrl-C, do not wait until gigabytes have been read
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _read(file: Path, most_named: int) -> RankTrace | str:
    """Returns the trace, or the reason why the file cannot be used, so that other files are still read."""
    try:
        return read_rank(file, most_named)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError) as error:
        return f"cannot be analyzed ({type(error).__name__}: {error})"


def _one_run(traces: list[RankTrace]) -> tuple[tuple[RankTrace, ...], list[str]]:
    """Returns one trace per rank of the run with the most ranks (the newest if there are several)."""
    runs = _runs(traces)
    run = max(runs, key=lambda run: (_num_ranks(run), run[0].steps[0].start_s))
    notes = [
        f"{Path(trace.path).name}: skipped: from another run of {trace.world_size or 'unknown'} ranks, "
        f"{abs(trace.steps[0].start_s - run[0].steps[0].start_s):.0f} s apart"
        for other in runs
        if other is not run
        for trace in other
    ]
    of_rank: dict[int, RankTrace] = {}
    for trace in sorted(run, key=lambda trace: (trace.rank < 0, trace.steps[0].start_s, trace.path)):
        name = Path(trace.path).name
        rank = trace.rank
        if rank < 0 and (same := next((kept for kept in of_rank.values() if _is_same(kept, trace)), None)):
            notes.append(f"{name}: skipped: {Path(same.path).name} is a recording of the same process")
            continue
        if rank < 0:
            rank = max(of_rank, default=-1) + 1
            notes.append(f"{name}: no rank in the trace or the file name; treated as rank {rank}")
        if rank in of_rank:
            notes.append(
                f"{name}: skipped: rank {rank} already has {Path(of_rank[rank].path).name} of the same run"
            )
        else:
            of_rank[rank] = replace(trace, rank=rank)
            notes += [f"{name}: {note}" for note in trace.notes]
    return tuple(of_rank[rank] for rank in sorted(of_rank)), notes


def _num_ranks(run: Sequence[RankTrace]) -> int:
    return len({trace.rank if trace.rank >= 0 else trace.process or trace.path for trace in run})


def _is_same(trace: RankTrace, other: RankTrace) -> bool:
    """Returns whether one process made both recordings, which cannot be at the same time."""
    first, second = sorted((trace, other), key=lambda trace: trace.steps[0].start_s)
    return bool(trace.process) and (
        trace.process == other.process and first.steps[-1].end_s <= second.steps[0].start_s
    )


def _runs(traces: list[RankTrace]) -> list[list[RankTrace]]:
    """Groups traces of the same world size that were recorded at about the same time."""
    ordered = sorted(traces, key=lambda trace: (trace.world_size, trace.steps[0].start_s))
    runs = [ordered[:1]]
    for last, trace in pairwise(ordered):
        apart_s = trace.steps[0].start_s - last.steps[0].start_s
        if trace.world_size == last.world_size and apart_s <= _SAME_RUN_S:
            runs[-1].append(trace)
        else:
            runs.append([trace])
    return runs
