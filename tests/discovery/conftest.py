"""No test of this directory loads an MPI library into pytest's own process."""

import pytest

from ddp_hpc.discovery import rank_communication


@pytest.fixture(autouse=True)
def no_mpi_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rank_communication, "mpi_library", lambda: "MPICH 5.0.2 (/opt/mpich/lib/libmpi.so.12)"
    )


@pytest.fixture
def without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_communication, "mpi4py_is_installed", lambda: False)


@pytest.fixture
def with_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_communication, "mpi4py_is_installed", lambda: True)
