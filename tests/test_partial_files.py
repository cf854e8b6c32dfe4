"""Hidden names of files in the making: any target has one, and only what dead writers left goes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ddp_hpc.partial_files import give_name, partial_file, remove_leftovers

DEAD_PID = 2**22 + 1  # above the kernel's largest


def left_by_a_dead_writer(folder: Path, name: str = "a.h5") -> Path:
    with partial_file(folder / name, "test") as partial:
        left = partial.with_name(re.sub(r"\d+\.partial$", f"{DEAD_PID}.partial", partial.name))
    left.write_bytes(b"x")
    return left


@pytest.mark.parametrize("name", ["x" * 255, "\u00e9" * 127, "\U0001f600" * 63, "\udcff" * 255])
def test_the_longest_name_has_a_hidden_one_that_is_told_from_others(tmp_path: Path, name: str) -> None:
    with (
        partial_file(tmp_path / name, "test") as partial,
        partial_file(tmp_path / (name[:-1] + "z"), "test") as other,
    ):
        partial.write_bytes(b"x")
        assert partial != other
        partial.replace(tmp_path / name)
    left_by_a_dead_writer(tmp_path, name)
    remove_leftovers(tmp_path, "test")
    assert list(tmp_path.iterdir()) == [tmp_path / name]


def test_an_error_of_the_block_is_not_lost_to_one_of_the_cleaning_up(tmp_path: Path) -> None:
    def fail() -> None:
        with partial_file(tmp_path / "a", "test") as partial:
            partial.mkdir()  # cannot be unlinked
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_a_process_id_of_another_container_says_nothing(tmp_path: Path) -> None:
    """Containers with the host's name have the same process ids for other processes."""
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    ours = left_by_a_dead_writer(tmp_path)
    theirs = ours.with_name(ours.name.replace(str(namespace), str(namespace + 1)))
    assert theirs != ours
    theirs.write_bytes(b"x")
    remove_leftovers(tmp_path, "test")
    assert list(tmp_path.iterdir()) == [theirs]


def test_a_name_that_is_taken_is_only_replaced_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError

    partial, target = tmp_path / "partial", tmp_path / "target"
    partial.write_bytes(b"new")
    target.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        give_name(partial, target, replace=False)
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", no_links)
        with pytest.raises(FileExistsError):
            give_name(partial, target, replace=False)
    assert target.read_bytes() == b"old"
    give_name(partial, target, replace=True)
    assert target.read_bytes() == b"new"
