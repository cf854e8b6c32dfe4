"""The search for NaN and infinities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from ddp_hpc.base.data_file_layout import ATTR_DTYPE, BFLOAT16
from ddp_hpc.data import check_finite as check
from ddp_hpc.data.check_finite import BadSample, first_bad_sample
from ddp_hpc.data.open_file import open_samples


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples per block, so that the conftest's 23 samples make eight blocks, the last of two."""
    monkeypatch.setattr(check, "_BLOCK_BYTES", 3 * 13 * 4)


def test_finite_samples_are_good(write: Callable[..., Path], values: dict[str, np.ndarray]) -> None:
    assert first_bad_sample(open_samples(write(".h5", values)), 0, 23) is None


@pytest.mark.parametrize("suffix", [".h5", ".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("value", "kind"), [(np.nan, "a NaN"), (np.inf, "an infinity"), (-np.inf, "an infinity")]
)
def test_the_first_bad_sample_is_named_with_its_array_and_kind(
    write: Callable[..., Path], values: dict[str, np.ndarray], suffix: str, value: float, kind: str
) -> None:
    values["src"][20, 1, 2] = values["src"][22] = value
    values["tgt"][17, 0] = value
    samples = open_samples(write(suffix, values))
    assert first_bad_sample(samples, 0, 23) == BadSample(17, "tgt", kind)
    assert first_bad_sample(samples, 18, 23) == BadSample(20, "src", kind)


@pytest.mark.parametrize("number", [2, 3, 22])
def test_no_sample_is_left_out_at_the_ends_of_blocks(
    write: Callable[..., Path], values: dict[str, np.ndarray], number: int
) -> None:
    values["src"][number] = np.nan
    assert first_bad_sample(open_samples(write(".h5", values)), 0, 23) == BadSample(number, "src", "a NaN")


def test_only_the_requested_range_is_read(write: Callable[..., Path], values: dict[str, np.ndarray]) -> None:
    values["src"][4] = values["src"][9] = np.nan
    samples = open_samples(write(".h5", values))
    assert first_bad_sample(samples, 5, 9) is None
    assert first_bad_sample(samples, 23, 23) is None


@pytest.mark.parametrize("dtype", ["float16"])
def test_every_float_is_checked_and_integers_are_skipped(
    write: Callable[..., Path], values: dict[str, np.ndarray], dtype: str
) -> None:
    values = {"src": values["src"].astype(dtype), "tgt": np.full((23, 3), 2**62)}
    values["src"][7] = np.inf
    samples = open_samples(write(".h5", values))
    assert first_bad_sample(samples, 0, 23) == BadSample(7, "src", "an infinity")


def test_integers_alone_are_not_even_read(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = open_samples(write(".h5", {"src": np.ones((4, 2), np.int32), "tgt": np.ones(4, np.int64)}))
    monkeypatch.setattr(samples, "read", None)
    assert first_bad_sample(samples, 0, 4) is None


@pytest.mark.parametrize(
    ("bits", "bad"),
    [
        (0x7F80, BadSample(5, "src", "an infinity")),
        (0x7FC0, BadSample(5, "src", "a NaN")),
        (0xFFFF, BadSample(5, "src", "a NaN")),
        (0x7F7F, None),  # the largest finite number
    ],
)
def test_bfloat16_nan_infinity_and_finite_bits_are_distinguished(
    tmp_path: Path, bits: int, bad: BadSample | None
) -> None:
    path = tmp_path / "bf16.h5"
    src = np.full((8, 2), 0x3F80, np.uint16)
    src[5, 1] = bits
    with h5py.File(path, "w") as file:
        for key, array in (("src", src), ("tgt", np.zeros(8, np.int64))):
            file[key] = array
        file["src"].attrs[ATTR_DTYPE] = BFLOAT16
    assert first_bad_sample(open_samples(path), 0, 8) == bad
