"""Real data files with changed, missing and added bytes: read, or refused in one line; never a traceback."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ddp_hpc.base.errors import DataError
from ddp_hpc.data.open_file import open_samples

# Where a format keeps its header.
_HEADER_BYTES = 400
_SOAK = pytest.param(range(200, 8000), marks=pytest.mark.soak, id="many")


def _mutated(content: bytes, seed: int) -> bytes:
    chance = random.Random(seed)
    found = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 5])):
        at = chance.randrange(len(found) if chance.random() < 0.5 else min(len(found), _HEADER_BYTES))
        match chance.randrange(5):
            case 0:
                found[at] ^= 1 << chance.randrange(8)
            case 1:
                found[at] = chance.choice([0, 1, 127, 255, *b'9-{"'])
            case 2:
                del found[at : at + chance.choice([1, 4, 100, len(found)])]
            case 3:
                found[at:at] = chance.randbytes(chance.choice([1, 8, 64]))
            case _:
                other = chance.randrange(len(found))
                found[at : at + 8] = found[other : other + 8]
        found = found or bytearray(b"x")
    return bytes(found)


@pytest.mark.parametrize("seeds", [pytest.param(range(200), id="some"), _SOAK])
@pytest.mark.parametrize("suffix", [".h5", ".pt", ".safetensors"])
def test_a_mutated_file_is_read_or_rejected_in_one_line(
    suffix: str, seeds: range, write: Callable[..., Path], values: dict[str, np.ndarray], tmp_path: Path
) -> None:
    arrays = {**values, "test/src": values["src"][:3], "test/tgt": values["tgt"][:3]}
    good = [write(suffix, arrays).read_bytes()]
    if suffix == ".h5":
        good.append(write(suffix, arrays, "packed", chunks=True, compression="gzip").read_bytes())
    path = tmp_path / f"mutated{suffix}"
    said: dict[int, str] = {}
    for seed in seeds:
        path.write_bytes(_mutated(good[seed % len(good)], seed))
        try:
            samples = open_samples(path)
            samples.read(np.array([0, samples.num_samples - 1]))
            samples.close()
        except DataError as error:
            said[seed] = str(error)
    assert 0 < len(said) < len(seeds), "mutations that all break a file, or none"
    for seed, line in said.items():
        assert path.name in line, seed
        assert "\n" not in line, seed
        assert "weights" not in line.lower(), seed
