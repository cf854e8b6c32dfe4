"""A recipe says all about a file: equal recipes, equal names, equal fingerprints."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_gen.recipe import Recipe, default_file_name, parse_shape
from ddp_hpc.errors import RequestError

OTHER = {
    "num_samples": 7,
    "src_shape": (2, 512),
    "tgt_shape": (20, 511),
    "dtype": "float64",
    "seed": 1,
    "distribution": "learnable",
    "format_version": 2,
}


def test_the_default_is_the_main_jobs_data():
    recipe = Recipe()
    assert (recipe.num_samples, recipe.src_shape, recipe.tgt_shape) == (2048, (1, 512), (20, 512))
    assert recipe.num_bytes == 2048 * 21 * 512 * 4


def test_the_name_tells_the_recipe():
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
        ({"num_samples": 0}, "num_samples 0"),
        ({"num_samples": -5}, "num_samples -5"),
        ({"num_samples": 10**18}, "more than any file can hold"),
        ({"src_shape": ()}, "src_shape ()"),
        ({"tgt_shape": (20, 0)}, "tgt_shape 20,0"),
        ({"tgt_shape": (1,) * 32}, "1 to 31 sizes"),
        ({"dtype": "float31"}, 'did you mean "float32"'),
        ({"distribution": "gauss"}, "none of uniform, normal, learnable, tokens"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**63}, "within 0 to 2**63 - 1"),
        ({"distribution": "learnable", "src_shape": (5000,), "tgt_shape": (5000,)}, "25000000 entries"),
    ],
)
def test_what_no_file_can_hold_is_refused(values, message):
    with pytest.raises(RequestError) as caught:
        Recipe(**values)
    assert message in str(caught.value)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=5))
def test_a_shape_is_read_as_it_is_written(sizes):
    assert parse_shape(", ".join(map(str, sizes))) == tuple(sizes)


@pytest.mark.parametrize(
    "text", ["", ",", "1,", "a", "1x512", "0", "-1", "1.5", "1,,2", "\u0661", "9" * 30, "1e3"]
)
def test_anything_else_is_no_shape(text):
    with pytest.raises(RequestError, match="is not a list of sizes"):
        parse_shape(text)
