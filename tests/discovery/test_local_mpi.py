"""The mpiexec for ranks on this machine, and the MPI library that belongs to it."""

from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.discovery.local_mpi import library_of
from ddp_hpc.launch import find_mpiexec as module
from ddp_hpc.launch.find_mpiexec import find_mpiexec
from tests.conftest import clean_environ


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The mpiexec of a site."""
    return program(tmp_path / "site" / "bin" / "mpiexec", "echo HYDRA")


def test_without_a_queue_the_mpiexec_of_the_wheel_is_used(mpiexec: Path, site: Path) -> None:
    environ = clean_environ({"PATH": f"{site.parent}:{clean_environ()['PATH']}"})
    assert find_mpiexec(environ, has_queue=False)[0] == str(mpiexec)
    assert find_mpiexec(environ, has_queue=True)[0] == str(site)


def test_without_a_wheel_the_first_mpiexec_on_the_path_is_used(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "bundled_mpiexec", lambda: None)
    assert find_mpiexec({"PATH": f"{site.parent}:/bin"}, has_queue=False) == (str(site), "HYDRA\n")
    with pytest.raises(RequestError, match="no mpiexec of an MPI library"):
        find_mpiexec({"PATH": "/nonexistent"}, has_queue=False)


def test_mpi4py_loads_the_library_of_the_mpiexec(tmp_path: Path) -> None:
    mine = program(tmp_path / "bin" / "mpiexec", "true")
    library = tmp_path / "lib" / "libmpi.so"
    library.parent.mkdir()
    library.touch()
    assert library_of(mine, {"A": "1"}) == {"MPI4PY_LIBMPI": str(library)}
    assert library_of(mine, {"MPI4PY_LIBMPI": "/the/users/own.so"}) == {}
