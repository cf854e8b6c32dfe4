"""The values of each distribution: their range, their rounding, and the rule that a model can learn."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from data_gen import Recipe, synthetic
from data_gen.synthetic import part
from ddp_hpc.base.errors import RequestError


def values(recipe: Recipe) -> dict[str, np.ndarray]:
    """Returns src and tgt, flattened, in file order."""
    pieces: dict[str, list[np.ndarray]] = {"src": [], "tgt": []}
    for name, first, piece in part(recipe):
        assert first == sum(each.size for each in pieces[name])
        pieces[name].append(piece.ravel().copy())
    return {name: np.concatenate(each) for name, each in pieces.items()}


def floats(bits: np.ndarray) -> np.ndarray:
    """Converts the bits of bfloat16 to float32."""
    return torch.from_numpy(bits).view(torch.bfloat16).float().numpy()


def tokens(num_samples: int = 400, shape: tuple[int, ...] = (50,), **fields: object) -> Recipe:
    return Recipe(
        **{
            "num_samples": num_samples,
            "src_shape": shape,
            "tgt_shape": shape,
            "dtype": "int32",
            "distribution": "tokens",
            **fields,
        }
    )


def test_uniform_bfloat16_stays_below_1():
    recipe = Recipe(num_samples=4000, src_shape=(64,), tgt_shape=(1,), dtype="bfloat16")
    found = floats(values(recipe)["src"])
    assert (found.min(), found.max()) == (0.0, 255 / 256)
    assert len(np.unique(found)) == 256


def test_bfloat16_is_rounded_as_torch_does():
    stream = np.random.Generator(np.random.SFC64(3))
    exponents = 2.0 ** stream.integers(-120, 120, 20_000)
    several = (stream.standard_normal(20_000) * exponents).astype(np.float32)
    ties = np.arange(0x3F80_8000, 0x3F90_8000, 0x1_0000, dtype=np.uint32).view(np.float32)
    for each in (several, ties):
        expected = torch.from_numpy(each).to(torch.bfloat16).view(torch.uint16).numpy()
        np.testing.assert_array_equal(synthetic._cast(each, "bfloat16"), expected)


@pytest.mark.parametrize(
    ("dtype", "vocab_size"),
    [("uint8", 256), ("uint8", 2), ("int16", 2**15), ("int32", 50_257), ("int64", 2**28)],
)
def test_tokens_follow_the_rule_except_for_a_tenth(dtype, vocab_size):
    found = values(tokens(dtype=dtype, vocab_size=vocab_size))
    assert {array.dtype.name for array in found.values()} == {dtype}
    for array in found.values():
        assert array.min() >= 0
        assert array.max() < vocab_size
        assert abs(array.mean(dtype=float) / (vocab_size - 1) - 0.5) < 0.02
    follows = found["tgt"] == (3 * found["src"].astype(np.int64) + 1) % vocab_size
    # Noise may equal the token of the rule by chance. The tolerance is 6 standard errors of 20,000 elements.
    assert abs(follows.mean() - (0.9 + 0.1 / vocab_size)) < 6 * np.sqrt(0.09 / follows.size)


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
    ("tokens", "uint8"): "1eb06df112de645e",
    ("tokens", "int16"): "51dce38e50fd67f3",
    ("tokens", "int64"): "f0e91a7c9575d411",
}


@pytest.mark.parametrize(("distribution", "dtype"), VALUES)
def test_the_values_of_a_seed_are_fixed_for_any_buffer_size(monkeypatch, distribution, dtype):
    recipe = Recipe(
        num_samples=300,
        src_shape=(1, 64),
        tgt_shape=(1, 64) if distribution == "tokens" else (3, 50),
        dtype=dtype,
        distribution=distribution,
    )
    for buffer_elements in (synthetic._BUFFER_ELEMENTS, 333):
        monkeypatch.setattr(synthetic, "_BUFFER_ELEMENTS", buffer_elements)
        found = values(recipe)
        digest = hashlib.sha256(found["src"].tobytes() + found["tgt"].tobytes()).hexdigest()
        assert digest[:16] == VALUES[distribution, dtype]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "float32"}, "tokens values cannot have dtype float32; use uint8, int16, int32, int64"),
        ({"distribution": "uniform"}, "uniform values cannot have dtype int32"),
        ({"dtype": "uint8", "vocab_size": 257}, "range 2 to 256 for dtype uint8 (got 257)"),
        ({"dtype": "int16", "vocab_size": 2**15 + 1}, "range 2 to 32768"),
        ({"dtype": "int64", "vocab_size": 2**28 + 1}, "range 2 to 268435456"),
        ({"vocab_size": 1}, "(got 1)"),
        ({"tgt_shape": (49,)}, "tgt_shape 49 differs from src_shape 50"),
        (
            {"distribution": "uniform", "dtype": "float32", "vocab_size": 100},
            "vocab_size 100 applies only to the distribution tokens, not to uniform",
        ),
    ],
)
def test_inconsistent_fields_are_rejected(fields, message):
    with pytest.raises(RequestError) as caught:
        tokens(**fields)
    assert message in str(caught.value)
