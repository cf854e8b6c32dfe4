"""The stripe layout of a new file on Lustre, set by an environment variable of the job script."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data_gen import Recipe, generate, striping
from data_gen.striping import HINT, stripe
from ddp_hpc.data.open_file import open_samples

LARGE = 4 * 10**9
LFS = Path(__file__).parents[1] / "fakes" / "lustre" / "lfs.py"


@pytest.fixture
def lustre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that the stand-in for lfs treats as a Lustre mount; the hint is `8,4M`."""
    mount = tmp_path / "lustre"
    mount.mkdir()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "lfs"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {LFS} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("LFS_STAND_IN_MOUNT", str(mount))
    monkeypatch.setenv("LFS_STAND_IN_LOG", str(tmp_path / "log"))
    monkeypatch.setenv(HINT, "8,4M")
    return mount


@pytest.fixture
def layouts(tmp_path: Path) -> Callable[[], list[str]]:
    """Returns stripe count, stripe size in bytes and inode of each file that lfs created."""
    return lambda: (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []


def test_an_empty_file_with_the_requested_layout_is_created(lustre: Path, layouts) -> None:
    assert stripe(lustre / "train.h5", LARGE) is None
    assert (lustre / "train.h5").read_bytes() == b""
    assert layouts() == [f"8 {4 * 2**20} {(lustre / 'train.h5').stat().st_ino}"]


@pytest.mark.parametrize(
    ("hint", "layout"), [("4", "4 0"), ("-1", "-1 0"), ("72,1m", "72 1048576"), ("1,65536", "1 65536")]
)
def test_count_alone_or_count_and_size(
    lustre: Path, layouts, monkeypatch: pytest.MonkeyPatch, hint: str, layout: str
) -> None:
    monkeypatch.setenv(HINT, hint)
    assert stripe(lustre / "train.h5", LARGE) is None
    assert layouts() == [f"{layout} {(lustre / 'train.h5').stat().st_ino}"]


def test_on_other_file_systems_nothing_happens(lustre: Path, tmp_path: Path) -> None:
    assert stripe(tmp_path / "train.h5", LARGE) is None
    assert not (tmp_path / "train.h5").exists()


def test_a_small_file_has_the_layout_of_its_directory(lustre: Path, layouts) -> None:
    assert stripe(lustre / "train.h5", 10**9 - 1) is None
    assert layouts() == []
    assert stripe(lustre / "train.h5", 10**9) is None
    assert len(layouts()) == 1


def test_without_the_hint_or_without_lfs_nothing_happens(
    lustre: Path, layouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HINT, "")
    assert stripe(lustre / "train.h5", LARGE) is None
    monkeypatch.setenv(HINT, "8,4M")
    monkeypatch.setenv("PATH", "/nowhere")
    assert stripe(lustre / "train.h5", LARGE) is None
    assert layouts() == []


@pytest.mark.parametrize(
    "hint", ["8,", ",4M", "0", "-2", "8,4T", "8 4M", "8,4M,1", "eight", "-c 8", "8,-1", "8\n"]
)
def test_an_invalid_hint_is_a_warning_and_lfs_is_not_called(
    lustre: Path, layouts, monkeypatch: pytest.MonkeyPatch, hint: str
) -> None:
    monkeypatch.setenv(HINT, hint)
    warning = stripe(lustre / "train.h5", LARGE)
    assert warning == f"ignoring invalid {HINT}={hint!r}; expected COUNT or COUNT,SIZE, such as 8,4M"
    assert "\n" not in warning
    assert layouts() == []


def test_a_layout_that_lustre_rejects_is_a_warning_of_one_line(
    lustre: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HINT, "8,100k")
    warning = stripe(lustre / "train.h5", LARGE)
    assert "must be an even multiple of 65536 bytes" in warning
    assert "\n" not in warning


def test_an_existing_file_keeps_its_contents_and_layout(lustre: Path) -> None:
    (lustre / "train.h5").write_bytes(b"abc")
    assert "stripe already set" in stripe(lustre / "train.h5", LARGE)
    assert (lustre / "train.h5").read_bytes() == b"abc"


def test_a_server_that_does_not_respond_is_a_warning(lustre: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LFS_STAND_IN_DELAY_S", "60")
    monkeypatch.setattr(striping, "_LIMIT_S", 0.2)
    assert "timed out" in stripe(lustre / "train.h5", LARGE)


def test_an_lfs_that_cannot_be_run_is_a_warning(
    lustre: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin" / "lfs").write_bytes(b"\x7fELF no program")
    assert "Exec format error" in stripe(lustre / "train.h5", LARGE)


@pytest.mark.parametrize("suffix", [".h5", ".safetensors"])
def test_a_generated_file_has_the_requested_layout(
    lustre: Path, layouts, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(striping, "_LARGE_BYTES", 1000)
    path = lustre / f"train{suffix}"
    generate(Recipe(num_samples=10, src_shape=(1, 8), tgt_shape=(3, 8)), path)
    # The layout belongs to the inode, so the file that lfs created must be the one that was filled.
    assert layouts() == [f"8 {4 * 2**20} {path.stat().st_ino}"]
    assert open_samples(path).num_samples == 10
