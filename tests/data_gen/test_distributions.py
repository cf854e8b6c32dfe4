"""The values of each distribution: their range, their rounding, and the rule that a model can learn."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from data_gen import Recipe, synthetic
from data_gen.synthetic import chunks_of


def values(recipe: Recipe) -> dict[str, np.ndarray]:
    """Returns src and tgt, flattened, in file order."""
    pieces: dict[str, list[np.ndarray]] = {"src": [], "tgt": []}
    for name, first, piece in chunks_of(recipe):
        assert first == sum(each.size for each in pieces[name])
        pieces[name].append(piece.ravel().copy())
    return {name: np.concatenate(each) for name, each in pieces.items()}


def test_bfloat16_is_rounded_as_torch_does():
    stream = np.random.Generator(np.random.SFC64(3))
    exponents = 2.0 ** stream.integers(-120, 120, 20_000)
    several = (stream.standard_normal(20_000) * exponents).astype(np.float32)
    ties = np.arange(0x3F80_8000, 0x3F90_8000, 0x1_0000, dtype=np.uint32).view(np.float32)
    for each in (several, ties):
        expected = torch.from_numpy(each).to(torch.bfloat16).view(torch.uint16).numpy()
        np.testing.assert_array_equal(synthetic._cast(each, "bfloat16"), expected)


# First digits of the SHA-256 of src and tgt. If the values change, increase FORMAT_VERSION. Learnable values
# do not depend on the BLAS library.
VALUES = {
    ("uniform", "float16"): "5e250616d9006560",
    ("uniform", "float32"): "9d4bfa6559899122",
    ("uniform", "float64"): "474ab032ccb15540",
    ("learnable", "float16"): "e7ca794bc6f9f2da",
    ("learnable", "float32"): "9e4cc78081d24619",
    ("learnable", "float64"): "ffdc2a98193804de",
    ("uniform", "bfloat16"): "4357d0bc61577adb",
    ("learnable", "bfloat16"): "539b70f3b0e77cbe",
}


@pytest.mark.parametrize(("distribution", "dtype"), VALUES)
def test_the_values_of_a_seed_are_fixed_for_any_buffer_size(monkeypatch, distribution, dtype):
    recipe = Recipe(
        num_samples=300,
        src_shape=(1, 64),
        tgt_shape=(3, 50),
        dtype=dtype,
        distribution=distribution,
    )
    for buffer_elements in (synthetic._BUFFER_ELEMENTS, 333):
        monkeypatch.setattr(synthetic, "_BUFFER_ELEMENTS", buffer_elements)
        found = values(recipe)
        digest = hashlib.sha256(found["src"].tobytes() + found["tgt"].tobytes()).hexdigest()
        assert digest[:16] == VALUES[distribution, dtype]
