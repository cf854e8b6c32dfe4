"""Checks of process limits, which the tests lower in a child process if possible."""

import os
import resource
from pathlib import Path

import pytest

from ddp_hpc.doctor import limits
from ddp_hpc.doctor.check_result import Here, Result
from ddp_hpc.doctor.run_in_child import collect, start


def with_open_files(soft: int, hard: int) -> Result:
    """Returns the finding under these limits, which are set in a child process."""

    def work() -> Result:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return limits.open_files(Here({}))

    found = collect(start(work, 10.0))
    assert isinstance(found, Result)
    return found


def test_a_low_soft_limit_of_open_files_is_reported_with_the_command() -> None:
    found = with_open_files(256, 5000)
    assert (found.status, found.remedy) == ("warn", "ulimit -n 5000 in the job script")
    assert found.what == "the limit is 256 open files, at least 4096 are recommended"


def test_a_low_hard_limit_of_open_files_is_left_to_the_site() -> None:
    found = with_open_files(256, 256)
    assert found.status == "warn"
    assert "ask the site" in found.remedy


def test_a_locked_memory_limit_matters_only_with_an_rdma_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (65536, resource.RLIM_INFINITY))
    monkeypatch.setattr(limits, "_RDMA", ("/nonexistent/infiniband",))
    assert limits.locked_memory(Here({})).status == "ok"
    monkeypatch.setattr(limits, "_RDMA", ("/dev/null",))
    found = limits.locked_memory(Here({}))
    assert found.status == "warn"
    assert found.remedy == "ulimit -l unlimited in the job script"


def test_a_missing_dev_shm_fails(tmp_path: Path) -> None:
    assert limits.shared_memory_in(tmp_path / "shm").status == "fail"


@pytest.mark.parametrize(("free_mib", "status"), [(64, "fail"), (512, "warn"), (4096, "ok")])
def test_space_in_dev_shm(
    tmp_path: Path, free_mib: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = os.statvfs_result((4096, 4096, free_mib * 256, free_mib * 256, free_mib * 256, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: space)
    found = limits.shared_memory_in(tmp_path)
    assert found.status == status
    assert ("--shm-size" in found.remedy) == (status != "ok")


def test_packages_in_the_user_site_directory_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limits.python(Here({})).status == "ok"
    (tmp_path / "torch").mkdir()
    monkeypatch.setattr(limits, "_user_site", lambda: tmp_path)
    found = limits.python(Here({}))
    assert found.status == "warn"
    assert f"with torch from {tmp_path}" in found.what
    assert "PYTHONNOUSERSITE=1" in found.remedy
