"""Checks of directories: free space, sockets, HDF5's lock, and timestamps."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ddp_hpc.doctor import storage
from ddp_hpc.doctor.check_result import Here
from ddp_hpc.doctor.run_in_child import collect, start

REFUSED = (
    "[Errno 5] Unable to synchronously create file (unable to lock file, errno = 524, error message = '')"
)


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
    for check in (storage.temp_space, storage.temp_sockets):
        found = check(here)
        assert found.status == "fail"
        assert "No such file or directory" in found.what
        assert "export TMPDIR=/tmp" in found.remedy


def test_a_directory_without_write_permission_is_a_failure(
    open_folder: Path, as_nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    with as_nobody():
        found = storage.space_in(open_folder, 1, 1, "move")
    if os.geteuid() != 0:
        pytest.skip("only root can switch to another user")
    assert (found.status, "Permission denied" in found.what) == ("fail", True)


def test_a_tmpdir_too_long_for_a_workers_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    found = storage.temp_sockets(Here({"TMPDIR": str(deep)}))
    assert found.status == "fail"
    assert "(limit 107)" in found.what


def test_the_longest_accepted_tmpdir_works_for_a_real_socket() -> None:
    length = 107 - len("/pymp-12345678/listener-12345678")
    deep = Path("/tmp") / ("x" * (length - len("/tmp/")))
    deep.mkdir(exist_ok=True)
    try:
        assert storage.temp_sockets(Here({"TMPDIR": str(deep)})).status == "ok"
        assert not list(deep.iterdir())
    finally:
        deep.rmdir()


def test_the_hdf5_lock_is_tested_with_a_real_file_that_is_removed(tmp_path: Path) -> None:
    here = Here({"HDF5_USE_FILE_LOCKING": "FALSE"}, tmp_path)
    found = collect(start(lambda: storage.hdf5_locking(here), 30.0))
    assert (found.status, found.what) == ("ok", f"HDF5 can lock files in {tmp_path}")
    assert not list(tmp_path.iterdir())


def test_an_unsupported_lock_is_a_warning_with_the_variable() -> None:
    found = storage.lock_finding(REFUSED, "", "/lustre/x")
    assert found.status == "warn"
    assert "export HDF5_USE_FILE_LOCKING=FALSE" in found.remedy


def test_an_unsupported_lock_that_the_environment_disables_is_ok() -> None:
    assert storage.lock_finding(REFUSED, "FALSE", "/lustre/x").status == "ok"
    assert storage.lock_finding(REFUSED, "TRUE", "/lustre/x").status == "warn"


def test_another_error_of_hdf5_is_not_a_lock_problem() -> None:
    found = storage.lock_finding("[Errno 28] No space left on device", "FALSE", "/full")
    assert (found.status, "No space left" in found.what) == ("fail", True)


def test_the_clocks_of_this_machine_agree(tmp_path: Path) -> None:
    assert storage.clock(Here({}, tmp_path)).status == "ok"


NOW_S = 1.8e9


@pytest.mark.parametrize(
    ("modified_s", "status"),
    [(NOW_S, "ok"), (NOW_S + 1.5, "ok"), (NOW_S + 5, "warn"), (NOW_S - 5, "warn")],
)
def test_a_file_server_with_a_wrong_clock(modified_s: float, status: str) -> None:
    found = storage.clock_finding(NOW_S, modified_s, NOW_S + 0.1)
    assert found.status == status


def test_a_slow_file_system_is_not_a_skew() -> None:
    assert storage.clock_finding(NOW_S, NOW_S + 30, NOW_S + 60).status == "ok"


def test_a_clock_in_1970_is_a_failure() -> None:
    assert "1970-01-01" in storage.clock_finding(5.0, 5.0, 5.0).what
