"""Generates random arrays in blocks of samples, whose values depend only on seed, array and block number.

Each block has a separate random stream: SFC64 (NumPy's fastest bit generator) seeded by
`SeedSequence(seed, spawn_key=(array, block))`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.formats import Array, Contents
from data_gen.recipe import Recipe
from data_gen.writer import CHUNKS_IN_FLIGHT, Chunk, GenerateResult, Progress, write_file
from ddp_hpc.base.data_file_layout import ATTR_SEED, BFLOAT16, SRC, TGT

_BLOCK_BYTES = 32 * 1024 * 1024
# Number of elements that one NumPy call generates. These elements fit into the cache of a core, and Python
# handles signals between two calls.
_BUFFER_ELEMENTS = 512 * 1024

# The first elements of the spawn keys. Changing them would change the data of every recipe.
_SRC_KEY, _TGT_KEY, _MAP_KEY = 0, 1, 2

# The entries of the map are integer multiples of 1/128 and src has 24 bits, so sums over up to 2**21
# products are exact in float64, and the data does not depend on the summation order of the BLAS library.
_MAP_UNIT = 128
_NOISE = 0.01

# Uniform values are rounded down to multiples of 2**-11 or 2**-8, which these types represent exactly;
# rounding to nearest could return 1.0.
_STEPS = {"float16": 2048.0, BFLOAT16: 256.0}


def generate(
    recipe: Recipe,
    path: Path,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> GenerateResult:
    """Writes the file of this recipe to `path`, unless a complete file with the same fingerprint exists.

    The suffix selects the format: `.h5`, `.hdf5`, `.pt` or `.safetensors`. The file is written under a hidden
    name in the same directory, and renamed when it is complete and on disk. `progress(done_bytes,
    total_bytes)` is called while it is written.

    Raises:
        RequestError: the suffix is unknown, there is too little space, or another file exists
            at `path` and `force` is not set.
        DdpHpcError: writing failed; no partial file is left.
    """
    return write_file(path, contents(recipe), lambda: chunks_of(recipe), force=force, progress=progress)


def contents(recipe: Recipe) -> Contents:
    """Returns the arrays and the metadata of the file for a recipe."""
    return Contents(
        arrays=(
            Array(SRC, (recipe.num_samples, *recipe.src_shape), recipe.dtype),
            Array(TGT, (recipe.num_samples, *recipe.tgt_shape), recipe.dtype),
        ),
        recipe=recipe.fields,
        attributes={ATTR_SEED: recipe.seed},
    )


def chunks_of(recipe: Recipe) -> Iterator[Chunk]:
    """Yields the chunks of the file; the array of each is overwritten after CHUNKS_IN_FLIGHT more chunks."""
    blocks = range(-(-recipe.num_samples // block_samples(recipe)))
    return (_learnable if recipe.distribution == "learnable" else _uniform)(recipe, blocks)


def block_samples(recipe: Recipe) -> int:
    """Returns the number of samples per block: as many as fit into 32 MiB with src and tgt, at least one.

    It does not depend on num_samples, so a longer file begins with the samples of a shorter one.
    """
    return max(1, _BLOCK_BYTES // recipe.bytes_per_sample)


def _span(recipe: Recipe, block: int) -> tuple[int, int]:
    """Returns the range [start, stop) of the samples of a block."""
    step = block_samples(recipe)
    return block * step, min((block + 1) * step, recipe.num_samples)


def _stream(recipe: Recipe, *spawn_key: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(recipe.seed, spawn_key=spawn_key)))


def _draw_uniform(stream: np.random.Generator, out: NDArray[Any], dtype: str) -> None:
    """Fills `out` (float32 or float64) with values in [0, 1) that are still less than 1 after conversion to
    `dtype`.
    """
    stream.random(dtype=out.dtype, out=out)
    if steps := _STEPS.get(dtype):
        out *= steps
        np.floor(out, out=out)
        out /= steps


def _cast(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Converts finite values to `dtype`, rounding as torch does; bfloat16 is returned as its bits."""
    if dtype != BFLOAT16:
        return values.astype(dtype, copy=False)
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _uniform(recipe: Recipe, blocks: range) -> Iterator[Chunk]:
    drawn_dtype = np.float64 if recipe.dtype == "float64" else np.float32
    buffers = cycle([np.empty(_BUFFER_ELEMENTS, drawn_dtype) for _ in range(CHUNKS_IN_FLIGHT + 1)])
    for name, key, shape in ((SRC, _SRC_KEY, recipe.src_shape), (TGT, _TGT_KEY, recipe.tgt_shape)):
        for block in blocks:
            start, stop = _span(recipe, block)
            stream = _stream(recipe, key, block)
            end = stop * prod(shape)
            for first in range(start * prod(shape), end, _BUFFER_ELEMENTS):
                values = next(buffers)[: min(_BUFFER_ELEMENTS, end - first)]
                _draw_uniform(stream, values, recipe.dtype)
                yield name, first, _cast(values, recipe.dtype)


def _learnable(recipe: Recipe, blocks: range) -> Iterator[Chunk]:
    num_src, num_tgt = prod(recipe.src_shape), prod(recipe.tgt_shape)
    weights = (
        _stream(recipe, _MAP_KEY)
        .integers(-_MAP_UNIT, _MAP_UNIT, size=(num_src, num_tgt), dtype=np.int16)
        .astype(np.float64)
    )
    # With this scale, the variance of tgt does not depend on the size of src.
    scale = 1.0 / (_MAP_UNIT * np.sqrt(num_src))
    rows = max(1, _BUFFER_ELEMENTS // max(num_src, num_tgt))
    for block in blocks:
        start, stop = _span(recipe, block)
        src_stream, noise_stream = _stream(recipe, _SRC_KEY, block), _stream(recipe, _TGT_KEY, block)
        for first in range(start, stop, rows):
            num = min(rows, stop - first)
            src = np.empty((num, num_src), np.float32)
            _draw_uniform(src_stream, src, recipe.dtype)
            noise = noise_stream.random((num, num_tgt))
            tgt = (src.astype(np.float64) @ weights) * scale + _NOISE * (2.0 * noise - 1.0)
            yield SRC, first * num_src, _cast(src, recipe.dtype)
            yield TGT, first * num_tgt, _cast(tgt, recipe.dtype)
