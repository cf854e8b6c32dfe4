"""Checks of the free space in directories."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ddp_hpc.doctor import storage
from ddp_hpc.doctor.check_result import Here


def test_a_directory_with_enough_space_is_ok_and_left_unchanged(tmp_path: Path) -> None:
    assert storage.space_in(tmp_path, 1, 1, "move").status == "ok"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("least", "good", "status"), [(1 << 60, 1 << 61, "fail"), (1, 1 << 61, "warn")])
def test_too_little_space(tmp_path: Path, least: int, good: int, status: str) -> None:
    found = storage.space_in(tmp_path, least, good, "move")
    assert (found.status, found.remedy) == (status, "move")


def test_nodes_are_not_compared_by_their_free_space(tmp_path: Path) -> None:
    assert "free" not in storage.space_in(tmp_path, 1, 1, "move").compared_by


def test_a_missing_directory_is_a_failure() -> None:
    here = Here({"TMPDIR": "/no/such/directory"})
    finding = storage.temp_space(here)
    assert finding.status == "fail"
    assert "No such file or directory" in finding.what
    assert "export TMPDIR=/tmp" in finding.remedy


def test_a_directory_without_write_permission_is_a_failure(
    open_folder: Path, as_nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    with as_nobody():
        found = storage.space_in(open_folder, 1, 1, "move")
    if os.geteuid() != 0:
        pytest.skip("only root can switch to another user")
    assert (found.status, "Permission denied" in found.what) == ("fail", True)
