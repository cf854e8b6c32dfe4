"""Measures the time to load a batch from each file format, with the trainer's data loader and with others.

All rows with the same access pattern and batch size read the same samples in the same order.
"""

from __future__ import annotations

import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np
import torch

from data_gen import Recipe, generate
from data_gen.recipe import parse_shape
from ddp_hpc.base.data_file_layout import HDF5_SUFFIXES, SRC, TGT
from ddp_hpc.base.errors import DdpHpcError, RequestError, nearest
from ddp_hpc.base.text_table import Column, Row
from ddp_hpc.base.text_table import table as aligned
from ddp_hpc.base.units import format_bytes
from ddp_hpc.bench import results_output
from ddp_hpc.bench.data_loading import loaders
from ddp_hpc.bench.data_loading.interleaved_timing import WARM_UP_S, Source, measure
from ddp_hpc.bench.data_loading.loaders import Arrays, Order
from ddp_hpc.bench.results_output import available_bytes, format_us, say
from ddp_hpc.data.open_file import open_samples
from ddp_hpc.data.sample_order import EpochOrder
from ddp_hpc.data.samples import Samples
from ddp_hpc.training.input.batch_loader import batches_at_once

_FILES = {
    "hdf5": "contiguous.h5",
    "hdf5_chunked": "chunked.h5",
    "hdf5_gzip": "gzip.h5",
    "pt": "data.pt",
    "safetensors": "data.safetensors",
}
FORMATS = tuple(_FILES)
BASELINES = ("naive_hdf5", "memory", "memcpy")

# This size exceeds that of any processor cache, so that memcpy measures the speed of memory.
_MEMCPY_BYTES = 2**30
_MAX_BATCHES = 4096


@dataclass(frozen=True, kw_only=True)
class IoBench:
    """The options of `ddp-hpc bench io`."""

    recipe: Recipe = field(default_factory=Recipe)
    data: Path | None = None
    src_key: str = SRC
    tgt_key: str = TGT
    formats: tuple[str, ...] = FORMATS
    accesses: tuple[str, ...] = ("shuffled",)
    batch_sizes: tuple[int, ...] = (32,)
    workers: tuple[int, ...] = (0,)
    ahead: tuple[int, ...] = (0, 2)
    rounds: int = 8
    seconds: float = 0.25
    directory: Path | None = None


def command(json_file: Path | None, **options: Any) -> None:
    """Runs `ddp-hpc bench io` with its options, which are None if they were not given."""
    names = ("num_samples", "src_shape", "tgt_shape", "dtype", "formats", "directory")
    given: dict[str, Any] = {name: value for name in names if (value := options.pop(name)) is not None}
    if options["data"] and given:
        raise RequestError(
            f"--data {options['data']} cannot be combined with options for synthetic data "
            "(--num-samples --src-shape --tgt-shape --dtype --formats --dir)"
        )
    formats = given.pop("formats", None)
    options |= {
        "formats": formats.split(",") if formats else FORMATS,
        "directory": given.pop("directory", None),
    }
    for name in options["formats"]:
        if name not in FORMATS:
            raise RequestError(
                f"--formats: unknown format {name!r}{nearest(name, FORMATS)}; use {', '.join(FORMATS)}"
            )
    given |= {name: parse_shape(given[name]) for name in ("src_shape", "tgt_shape") if name in given}
    config = IoBench(recipe=Recipe(**given), **options)
    results_output.check_files(json_file, config.data)
    result = run(config)
    try:
        results_output.save(result, json_file)
    finally:
        click.echo(table(result))


def run(config: IoBench) -> dict[str, Any]:
    """Runs the benchmark, prints its progress on stderr, and returns the JSON document.

    The created files are removed at the end, also after Ctrl-C and SIGTERM.

    Raises:
        RequestError: a batch is larger than the data, or there is too little space on disk or in memory.
        DataError: the file given with `--data` cannot be used for training.
        DdpHpcError: the files cannot be written.
    """
    with ExitStack() as stack:
        stack.enter_context(_one_thread_and_sigterm())
        files = {_format_of(config.data): config.data} if config.data else make_files(config, stack)
        keys = {"src_key": config.src_key, "tgt_key": config.tgt_key}
        opened = {name: open_samples(path, **keys) for name, path in files.items()}
        samples = next(iter(opened.values()))
        largest = max(config.batch_sizes)
        arrays = _in_memory(samples, largest)
        _check_sizes(all_sources(config, files, arrays, samples, largest), samples, largest)
        if len(arrays[0]) < samples.num_samples:
            say("the data does not fit into memory, so rows that read from memory are omitted")
        machine = results_output.machine()
        say(f"{machine['host']}: {machine['cpu']}, {machine['cores']} cores, torch on 1 thread")
        rows: list[Row] = []
        for access, batch_size in product(config.accesses, config.batch_sizes):
            sources = all_sources(config, files, arrays, samples, batch_size)
            about_s = len(sources) * (config.rounds * config.seconds + WARM_UP_S)
            say(f"{access}, batches of {batch_size}: {len(sources)} rows, about {about_s:.0f} s")
            order = _order(samples.num_samples, batch_size, access)
            times = measure(sources, order, rounds=config.rounds, seconds=config.seconds)
            case = {"access": access, "batch_size": batch_size}
            rows += _rows(sources, times, case, batch_size * samples.sample_bytes)
    settings = {
        "place": str(config.data or config.directory or tempfile.gettempdir()),
        "num_samples": samples.num_samples,
        "src": f"{samples.src.dtype} {samples.src.shape}",
        "tgt": f"{samples.tgt.dtype} {samples.tgt.shape}",
        "readers": {name: reader.reader for name, reader in opened.items()},
        "rounds": config.rounds,
        "seconds": config.seconds,
    }
    packages = ("h5py", "safetensors")
    return results_output.document("io", rows, packages, machine=machine, settings=settings)


def table(result: dict[str, Any]) -> str:
    """Formats the rows of the result as text, in microseconds per batch."""
    columns = [
        Column("name", "loader"),
        Column("access", "access"),
        Column("batch_size", "batch"),
        Column("median_us", "median us", format_us),
        Column("p99_us", "p99 us", format_us),
        Column("max_us", "max us", format_us),
        Column("bytes_per_s", "GB/s", lambda rate: f"{rate / 1e9:.2f}"),
        *(Column(f"vs_{name}", f"/ {name}", _ratio) for name in BASELINES),
    ]
    return aligned(columns, result["rows"])


def _ratio(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"


def make_files(config: IoBench, stack: ExitStack) -> dict[str, Path]:
    """Writes the synthetic data in each format to a directory that is removed when `stack` is closed."""
    directory = config.directory or Path(tempfile.gettempdir())
    # The contiguous file is always written, because the baselines read it.
    formats = dict.fromkeys(("hdf5", *config.formats))
    size, free = config.recipe.num_bytes, shutil.disk_usage(directory).free
    if len(formats) * size > free:
        raise RequestError(
            f"{len(formats)} files of {format_bytes(size)} do not fit into {directory}, which has only "
            f"{format_bytes(free)} of free space. Use fewer samples or --formats, or another --dir."
        )
    try:
        created = tempfile.TemporaryDirectory(prefix="ddp-hpc-bench-", dir=directory)
    except OSError as error:
        raise RequestError(
            f"cannot write to --dir {directory} ({error.strerror}); choose another directory"
        ) from error
    files = {name: Path(stack.enter_context(created)) / _FILES[name] for name in formats}
    say(f"writing {format_bytes(size)} as {', '.join(formats)} in {created.name}")
    for name, path in files.items():
        if name in ("hdf5_chunked", "hdf5_gzip"):
            _rewrite_in_chunks(files["hdf5"], path, "gzip" if name == "hdf5_gzip" else None)
        else:
            generate(config.recipe, path)
    return files


def _rewrite_in_chunks(source: Path, target: Path, compression: str | None) -> None:
    """Writes the same data in chunks of h5py's default size, as in most HDF5 files."""
    try:
        with h5py.File(source, "r", locking=False) as old, h5py.File(target, "w", locking=False) as new:
            for key in (SRC, TGT):
                shape, dtype = old[key].shape, old[key].dtype
                made = new.create_dataset(key, shape, dtype, chunks=True, compression=compression)
                made.attrs.update(old[key].attrs)
                for chunk in made.iter_chunks():
                    made[chunk] = old[key][chunk]
    except (OSError, RuntimeError) as error:  # raised by HDF5 if the disk is full
        raise DdpHpcError(
            f"{target} could not be written; free space in its directory, or use another --dir"
        ) from error


def all_sources(
    config: IoBench, files: dict[str, Path], arrays: Arrays, samples: Samples, batch_size: int
) -> list[Source]:
    """Returns the rows of a case: the baselines, then the trainer's loader with each format and setting."""
    keys = config.src_key, config.tgt_key
    sources = [Source("memcpy", "memory", partial(loaders.memcpy, arrays))]
    if len(arrays[0]) == samples.num_samples:
        sources.append(Source("memory", "memory", partial(loaders.memory, arrays)))
        sources.append(Source("memory_indexed", "memory", partial(loaders.memory_indexed, arrays)))
    if path := files.get("hdf5"):
        sources.append(Source("naive_hdf5", "hdf5", partial(loaders.naive_hdf5, path, keys)))
        sources.append(Source("h5py_batch", "hdf5", partial(loaders.h5py_batch, path, keys)))
    ways = [(f" ahead={ahead}" if ahead else "", 0, ahead) for ahead in dict.fromkeys(config.ahead)]
    ways = ways if 0 in config.workers else []
    ways += [(f" workers={workers}", workers, 2) for workers in dict.fromkeys(config.workers) if workers]
    several = batches_at_once(batch_size * samples.sample_bytes)
    for name in files if config.data else dict.fromkeys(config.formats):
        for extra, workers, ahead in ways:
            at_once = 1 if workers else several
            opens = partial(loaders.reader, files[name], keys, workers=workers, ahead=ahead)
            sources.append(Source(name + extra, name, opens, workers, ahead, at_once))
    return sources


def _rows(
    sources: list[Source], times: list[list[float]], case: dict[str, Any], batch_bytes: int
) -> list[Row]:
    medians = {source.name: statistics.median(taken) for source, taken in zip(sources, times, strict=True)}
    return [
        {
            "name": source.name,
            "format": source.format,
            **case,
            "workers": source.workers,
            "ahead": source.ahead,
            "batches": len(taken) * source.together,
            "bytes": batch_bytes,
            "median_us": medians[source.name] * 1e6,
            "p99_us": float(np.percentile(taken, 99)) * 1e6,
            "max_us": max(taken) * 1e6,
            "bytes_per_s": batch_bytes / statistics.fmean(taken),
            **{
                f"vs_{name}": medians[source.name] / medians[name] if name in medians else None
                for name in BASELINES
            },
        }
        for source, taken in zip(sources, times, strict=True)
    ]


def _order(num_samples: int, batch_size: int, access: str) -> Order:
    """Returns the sample numbers of the first batches of an epoch, without a smaller last batch."""
    num_batches = min(num_samples // batch_size, _MAX_BATCHES)
    order = EpochOrder(num_samples, seed=0, epoch=0, shuffle=access == "shuffled")
    return list(order.take(0, num_batches * batch_size).reshape(num_batches, batch_size))


def _in_memory(samples: Samples, batch_size: int) -> Arrays:
    """Reads all samples if they fit into a quarter of the free memory; otherwise, reads only as many as
    memcpy needs.
    """
    num, sample_bytes = samples.num_samples, samples.sample_bytes
    if num * sample_bytes > available_bytes() // 4:
        num = min(num, max(batch_size, _MEMCPY_BYTES // sample_bytes))
    arrays = samples.read(np.arange(num))
    samples.close()
    return arrays


def _check_sizes(sources: list[Source], samples: Samples, batch_size: int) -> None:
    if batch_size > samples.num_samples:
        raise RequestError(
            f"--batch-size {batch_size} exceeds the {samples.num_samples} samples of the data; "
            "use smaller batches or more samples"
        )
    needed = batch_size * samples.sample_bytes * sum(source.prefetched + 2 for source in sources)
    if needed > available_bytes():
        raise RequestError(
            f"batches of {batch_size} samples for {len(sources)} measured rows need {format_bytes(needed)} "
            f"of memory, but only {format_bytes(available_bytes())} are available; use smaller batches or "
            "fewer --formats"
        )


def _format_of(path: Path) -> str:
    suffix = path.suffix.lower()
    return "hdf5" if suffix in HDF5_SUFFIXES else suffix.removeprefix(".")


@contextmanager
def _one_thread_and_sigterm() -> Iterator[None]:
    """Limits torch to one thread for all loaders, and lets SIGTERM remove the files before exiting."""
    threads = torch.get_num_threads()
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        signal.signal(signal.SIGTERM, handler)
