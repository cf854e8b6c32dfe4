"""Output common to all benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.text_table import Column, table
from ddp_hpc.bench.results_output import Panel, check_files, document, write_files

PANELS = [Panel("two ranks", [("a", 1.5, "1.5"), ("b", 300.0, "300")]), Panel("four", [("a", 2.0, "2")])]


def write(picture: Path) -> None:
    result: dict[str, Any] = document("scaling", [])
    write_files(result, None, picture, PANELS, "seconds")


def test_names_are_left_aligned_numbers_right_aligned_and_none_is_a_dash() -> None:
    columns = [Column("name", "loader"), Column("us", "median us", "{:,.0f}".format)]
    rows = [{"name": "a", "us": 12345.6}, {"name": "much longer", "us": None}]
    assert table(columns, rows).splitlines() == [
        "loader       median us",
        "a               12,346",
        "much longer          -",
    ]


@pytest.mark.parametrize(("name", "begins"), [("io.png", b"\x89PNG\r\n\x1a\n"), ("IO.SVG", b"<?xml")])
def test_the_suffix_determines_the_format_of_the_picture(tmp_path: Path, name: str, begins: bytes) -> None:
    write(tmp_path / "new" / name)
    assert (tmp_path / "new" / name).read_bytes().startswith(begins)


def test_a_picture_replaces_an_older_one(tmp_path: Path) -> None:
    picture = tmp_path / "io.svg"
    write(picture)
    picture.write_bytes(picture.read_bytes()[:20])
    check_files(None, picture)
    write(picture)
    assert picture.read_bytes().rstrip().endswith(b"</svg>")
    assert [path.name for path in tmp_path.iterdir()] == ["io.svg"]


def test_a_picture_does_not_overwrite_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.png").write_text("precious")
    with pytest.raises(RequestError, match=r"exists and is not a \.png file"):
        check_files(None, tmp_path / "thesis.png")


def test_json_does_not_overwrite_other_files(tmp_path: Path) -> None:
    (tmp_path / "train.h5").write_bytes(b"\x89HDF")
    with pytest.raises(RequestError, match="is the data and would be overwritten"):
        check_files(tmp_path / "train.h5", None, tmp_path / "train.h5")


def test_a_missing_matplotlib_is_reported_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RequestError, match=r"pip install .*matplotlib"):
        check_files(None, tmp_path / "io.png")
