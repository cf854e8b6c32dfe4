"""Directories with predictable names in places where other users could create them first."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ddp_hpc.base.private_directory import is_private, make_private
from ddp_hpc.training.process_group.kernel_caches import keep_kernels_private

AsNobody = Callable[[], AbstractContextManager[None]]


def test_a_missing_directory_is_created_for_this_user_only(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "triton-1"
    assert make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert make_private(folder)


def test_a_directory_that_others_can_use_is_not_private(tmp_path: Path) -> None:
    mine, all_may, linked, file = (tmp_path / name for name in ("mine", "all_may", "linked", "file"))
    mine.mkdir(mode=0o755)
    all_may.mkdir()
    all_may.chmod(0o777)
    linked.symlink_to(mine)
    file.touch()
    assert [make_private(path) for path in (mine, all_may, linked, file)] == [True, False, False, False]


def test_another_users_directory_is_not_private(open_folder: Path, as_nobody: AsNobody) -> None:
    if os.geteuid() != 0:
        pytest.skip("a folder of another user is needed: only root can make one")
    (open_folder / "theirs").mkdir(mode=0o755)
    with as_nobody():
        assert not is_private(open_folder / "theirs")
        assert not make_private(open_folder / "theirs")


def test_compiled_kernels_are_not_read_from_a_directory_that_others_can_write_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = tmp_path / "triton-1"
    planted.mkdir()
    planted.chmod(0o777)
    environ = {"TRITON_CACHE_DIR": str(planted), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "mine")}
    keep_kernels_private(environ, "n1")
    assert environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")
    assert is_private(tmp_path / "mine")
    taken = Path(environ["TRITON_CACHE_DIR"])
    assert taken != planted
    assert is_private(taken)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"[n1] warning: {planted} belongs to another user or is writable by others")
    taken.rmdir()
