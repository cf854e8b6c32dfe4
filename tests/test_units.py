"""Parsing and formatting of walltimes and byte sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import format_bytes, format_walltime, parse_bytes, parse_walltime_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("01:30:00", 5400),
        ("2-12:00:00", 216000),
        ("90m", 5400),
        ("1h30m", 5400),
        ("1d", 86400),
        (" 01:00:00 ", 3600),
    ],
)
def test_a_walltime_is_parsed_to_seconds(text: str, seconds: int) -> None:
    assert parse_walltime_s(text) == seconds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("25:99", "ambiguous"),
        ("01:99:00", "minutes must be at most 59 (got 99)"),
        ("1-24:00:00", "hours must be at most 23 if days are given"),
        ("00:00:00", "is zero"),
        ("90", "not a time"),
        ("1:00:00; rm x", "not a time"),
        ("1.5h", "not a time"),
    ],
)
def test_an_invalid_walltime_is_refused_with_the_format(text: str, said: str) -> None:
    with pytest.raises(RequestError, match="HH:MM:SS") as caught:
        parse_walltime_s(text)
    assert said in str(caught.value)


@given(st.integers(min_value=1, max_value=99999 * 3600))
def test_a_formatted_walltime_is_parsed_to_the_same_seconds(seconds: int) -> None:
    assert parse_walltime_s(format_walltime(seconds)) == seconds


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**60, "1024.0 PiB"),
    ],
)
def test_byte_sizes_are_formatted_in_binary_units(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("1B", 1), ("64KiB", 65536), (" 1.5 MiB ", 1572864), ("2GiB", 2**31), ("0.5KiB", 512)],
)
def test_a_size_is_parsed_to_bytes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    ["", "0", "0KiB", "-1", "1.3B", "1MB", "1kib", "1 K", "1e6", "\u0664KiB", "9" * 16, "nan", "1KiB1"],
)
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(
        RequestError, match="is not a size; use a number above 0, optionally with the unit B, KiB"
    ):
        parse_bytes(text)
