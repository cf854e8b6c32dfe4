"""Random arrays as a function of (seed, array, block of samples), whoever draws them and in whatever order.

Each block has a stream of its own, so several writers can share a file later:
SFC64 (1.3 GB/s of float32 on one core, the fastest NumPy has) seeded by
`SeedSequence(seed, spawn_key=(array, block))`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.formats import Array, Contents
from data_gen.recipe import Recipe
from data_gen.writer import GenerateResult, Piece, Progress, write_file
from ddp_hpc.h5_layout import ATTR_SEED, SRC, TGT

_BLOCK_BYTES = 32 * 1024 * 1024
# Elements drawn at a time into one reused buffer: it stays in a core's cache, and a signal is soon seen.
_BUFFER_ELEMENTS = 512 * 1024

# The first word of a spawn key. Part of the format: other numbers give other data.
_SRC_KEY, _TGT_KEY, _MAP_KEY = 0, 1, 2

# Map entries are whole multiples of 1/128 and src has 24 bits, so sums over up to 2**21 products
# are exact in float64 and no BLAS's order of summation shows in the data.
_MAP_UNIT = 128
_NOISE = 0.01


def generate(
    recipe: Recipe, path: Path, *, force: bool = False, progress: Progress | None = None
) -> GenerateResult:
    """The same as `data_gen.generate`."""
    contents = Contents(
        arrays=(
            Array(SRC, (recipe.num_samples, *recipe.src_shape), recipe.dtype),
            Array(TGT, (recipe.num_samples, *recipe.tgt_shape), recipe.dtype),
        ),
        recipe=recipe.fields,
        attributes={ATTR_SEED: recipe.seed},
    )
    draw = _learnable if recipe.distribution == "learnable" else _uniform
    return write_file(path, contents, partial(draw, recipe), force=force, progress=progress)


def block_samples(recipe: Recipe) -> int:
    """Samples in a block: as many as 32 MiB hold of src and tgt together, at least one.

    It does not depend on num_samples, so a longer file begins with the shorter one's samples.
    """
    return max(1, _BLOCK_BYTES // recipe.bytes_per_sample)


def _stream(recipe: Recipe, *spawn_key: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(recipe.seed, spawn_key=spawn_key)))


def _blocks(recipe: Recipe) -> Iterator[tuple[int, int, int]]:
    """Number, first sample and sample behind the last, of each block."""
    step = block_samples(recipe)
    for block, start in enumerate(range(0, recipe.num_samples, step)):
        yield block, start, min(start + step, recipe.num_samples)


def _draw(stream: np.random.Generator, out: NDArray[Any]) -> None:
    """Fill `out` (float32 or float64) with the stream's next values in [0, 1)."""
    stream.random(dtype=out.dtype, out=out)


def _to_half_grid(values: NDArray[Any]) -> None:
    """Round down to multiples of 2**-11, all of which float16 has: plain rounding would reach 1.0."""
    values *= 2048.0
    np.floor(values, out=values)
    values /= 2048.0


def _uniform(recipe: Recipe) -> Iterator[Piece]:
    dtype = np.dtype(recipe.dtype)
    drawn = np.empty(_BUFFER_ELEMENTS, np.float64 if recipe.dtype == "float64" else np.float32)
    for name, key, shape in ((SRC, _SRC_KEY, recipe.src_shape), (TGT, _TGT_KEY, recipe.tgt_shape)):
        for block, start, stop in _blocks(recipe):
            stream = _stream(recipe, key, block)
            end = stop * prod(shape)
            for first in range(start * prod(shape), end, _BUFFER_ELEMENTS):
                values = drawn[: min(_BUFFER_ELEMENTS, end - first)]
                _draw(stream, values)
                if recipe.dtype == "float16":
                    _to_half_grid(values)
                yield name, first, values.astype(dtype, copy=False)


def _learnable(recipe: Recipe) -> Iterator[Piece]:
    dtype = np.dtype(recipe.dtype)
    num_src, num_tgt = prod(recipe.src_shape), prod(recipe.tgt_shape)
    weights = (
        _stream(recipe, _MAP_KEY)
        .integers(-_MAP_UNIT, _MAP_UNIT, size=(num_src, num_tgt), dtype=np.int16)
        .astype(np.float64)
    )
    # Keeps the spread of tgt the same for every size of src.
    scale = 1.0 / (_MAP_UNIT * np.sqrt(num_src))
    rows = max(1, _BUFFER_ELEMENTS // max(num_src, num_tgt))
    for block, start, stop in _blocks(recipe):
        src_stream, noise_stream = _stream(recipe, _SRC_KEY, block), _stream(recipe, _TGT_KEY, block)
        for first in range(start, stop, rows):
            num = min(rows, stop - first)
            src = np.empty((num, num_src), np.float32)
            _draw(src_stream, src)
            if recipe.dtype == "float16":
                _to_half_grid(src)
            noise = np.empty((num, num_tgt), np.float64)
            _draw(noise_stream, noise)
            tgt = (src.astype(np.float64) @ weights) * scale + _NOISE * (2.0 * noise - 1.0)
            yield SRC, first * num_src, src.astype(dtype, copy=False)
            yield TGT, first * num_tgt, tgt.astype(dtype, copy=False)
