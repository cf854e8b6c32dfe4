"""Recipes: equal ones have equal names and fingerprints, and invalid values are rejected."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_gen.recipe import Recipe, default_file_name, parse_shape
from ddp_hpc.base.errors import RequestError

OTHER = {
    "num_samples": 7,
    "src_shape": (2, 512),
    "tgt_shape": (20, 511),
    "dtype": "float64",
    "seed": 1,
    "distribution": "learnable",
    "format_version": 2,
}


def test_the_default_is_the_data_of_the_main_job():
    recipe = Recipe()
    assert (recipe.num_samples, recipe.src_shape, recipe.tgt_shape) == (2048, (1, 512), (20, 512))
    assert recipe.num_bytes == 2048 * 21 * 512 * 4


def test_the_name_describes_the_recipe():
    assert default_file_name(Recipe(), ".pt") == "synthetic-2048-1x512-20x512-float32-seed0-dc1ba503.pt"


@pytest.mark.parametrize("field", OTHER)
def test_every_field_changes_fingerprint_and_name(field):
    base = Recipe(src_shape=(1, 512), tgt_shape=(2, 512))
    other = replace(base, **{field: OTHER[field]})
    assert other.fingerprint != base.fingerprint
    assert default_file_name(other) != default_file_name(base)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_samples": 0}, "num_samples must be at least 1 (got 0)"),
        ({"src_shape": ()}, "(got ())"),
        ({"tgt_shape": (20, 0)}, "(got 20,0)"),
        ({"tgt_shape": (1,) * 32}, "1 to 31 sizes"),
        ({"dtype": "float31"}, 'did you mean "float32"'),
        ({"distribution": "gauss"}, "is not one of uniform, learnable"),
        ({"seed": 2**63}, "range 0 to 2**63 - 1"),
        ({"distribution": "learnable", "src_shape": (5000,), "tgt_shape": (5000,)}, "25000000 entries"),
    ],
)
def test_invalid_values_are_rejected(values, message):
    with pytest.raises(RequestError) as caught:
        Recipe(**values)
    assert message in str(caught.value)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=5))
def test_a_shape_is_parsed(sizes):
    assert parse_shape(", ".join(map(str, sizes))) == tuple(sizes)


@pytest.mark.parametrize("text", ["", "1,", "1x512", "0", "-1", "\u0661", "9" * 30])
def test_invalid_shapes_are_rejected(text):
    with pytest.raises(RequestError, match="invalid shape"):
        parse_shape(text)
