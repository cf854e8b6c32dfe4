"""Folders: room, sockets, HDF5's lock, and the clock of the file system."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ddp_hpc.doctor import storage
from ddp_hpc.doctor.child import collect, start
from ddp_hpc.doctor.result import Here

REFUSED = (
    "[Errno 5] Unable to synchronously create file (unable to lock file, errno = 524, error message = '')"
)


def test_a_folder_with_room_is_well_and_left_as_it_was(tmp_path: Path) -> None:
    assert storage.room_in(tmp_path, 1, 1, "move").status == "ok"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("least", "good", "status"), [(1 << 60, 1 << 61, "fail"), (1, 1 << 61, "warn")])
def test_too_little_room(tmp_path: Path, least: int, good: int, status: str) -> None:
    found = storage.room_in(tmp_path, least, good, "move")
    assert (found.status, found.remedy) == (status, "move")


def test_nodes_are_not_told_apart_by_the_bytes_that_are_free(tmp_path: Path) -> None:
    assert "free" not in storage.room_in(tmp_path, 1, 1, "move").compared_by


def test_a_folder_that_is_not_there_fails() -> None:
    here = Here({"TMPDIR": "/no/such/folder"})
    for check in (storage.temp_space, storage.temp_sockets):
        found = check(here)
        assert found.status == "fail"
        assert "No such file or directory" in found.what
        assert "export TMPDIR=/tmp" in found.remedy


def test_a_folder_of_others_fails(
    open_folder: Path, as_nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    with as_nobody():
        found = storage.room_in(open_folder, 1, 1, "move")
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    assert (found.status, "Permission denied" in found.what) == ("fail", True)


def test_a_tmpdir_too_long_for_a_workers_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    found = storage.temp_sockets(Here({"TMPDIR": str(deep)}))
    assert found.status == "fail"
    assert "of at most 107" in found.what


def test_the_longest_tmpdir_that_is_let_through_takes_a_real_socket() -> None:
    room = 107 - len("/pymp-12345678/listener-12345678")
    deep = Path("/tmp") / ("x" * (room - len("/tmp/")))
    deep.mkdir(exist_ok=True)
    try:
        assert storage.temp_sockets(Here({"TMPDIR": str(deep)})).status == "ok"
        assert not list(deep.iterdir())
    finally:
        deep.rmdir()


def test_hdf5s_lock_is_tried_with_a_real_file_and_nothing_is_left(tmp_path: Path) -> None:
    here = Here({"HDF5_USE_FILE_LOCKING": "FALSE"}, tmp_path)
    found = collect(start(lambda: storage.hdf5_locking(here), 30.0))
    assert (found.status, found.what) == ("ok", f"HDF5 locks files in {tmp_path}")
    assert not list(tmp_path.iterdir())


def test_a_refused_lock_is_a_warning_with_the_variable() -> None:
    found = storage.lock_finding(REFUSED, "", "/lustre/x")
    assert found.status == "warn"
    assert "export HDF5_USE_FILE_LOCKING=FALSE" in found.remedy


def test_a_refused_lock_that_the_environment_does_without_is_well() -> None:
    assert storage.lock_finding(REFUSED, "FALSE", "/lustre/x").status == "ok"
    assert storage.lock_finding(REFUSED, "TRUE", "/lustre/x").status == "warn"


def test_another_fault_of_hdf5_is_no_matter_of_locks() -> None:
    found = storage.lock_finding("[Errno 28] No space left on device", "FALSE", "/full")
    assert (found.status, "No space left" in found.what) == ("fail", True)


def test_this_machines_clocks_agree(tmp_path: Path) -> None:
    assert storage.clock(Here({}, tmp_path)).status == "ok"


NOW_S = 1.8e9


@pytest.mark.parametrize(
    ("dated_s", "status"),
    [(NOW_S, "ok"), (NOW_S + 1.5, "ok"), (NOW_S + 5, "warn"), (NOW_S - 5, "warn")],
)
def test_a_file_servers_clock_that_is_off(dated_s: float, status: str) -> None:
    found = storage.clock_finding(NOW_S, dated_s, NOW_S + 0.1)
    assert found.status == status


def test_a_slow_file_system_is_no_skew() -> None:
    assert storage.clock_finding(NOW_S, NOW_S + 30, NOW_S + 60).status == "ok"


def test_a_clock_that_begins_in_1970_fails() -> None:
    assert "1970-01-01" in storage.clock_finding(5.0, 5.0, 5.0).what
