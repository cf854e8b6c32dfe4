"""The check of mpi4py and mpiexec, with two real MPI libraries."""

import re
import sys
from pathlib import Path

import pytest

from ddp_hpc.doctor import mpi
from ddp_hpc.doctor.check_result import Here
from ddp_hpc.doctor.run_in_child import collect, start
from tests.conftest import Launch, clean_environ
from tests.fakes.site import PBS_MPIEXEC

DOCTOR = ("-m", "ddp_hpc", "doctor", "--only", "mpi")


@pytest.mark.parametrize(
    ("version", "family"),
    [
        ("mpiexec (Open MPI) 5.0.11", "Open MPI"),
        ("mpirun (PRRTE) 3.0", "Open MPI"),
        ("HYDRA build details:\n    Version: 5.0.2", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11", "MPICH"),
        ("mpiexec version 1.2.12", ""),  # PALS, which starts ranks of MPICH without naming it
        ("", ""),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)", "MPICH"),
        ("Open MPI v5.0.11, package: Open MPI", "Open MPI"),
    ],
)
def test_the_family_is_detected_from_the_version_text(version: str, family: str) -> None:
    assert mpi.family_of(version) == family


def test_pbs_own_mpiexec_is_ignored(tmp_path: Path) -> None:
    program = tmp_path / "mpiexec"
    program.write_text(PBS_MPIEXEC)
    program.chmod(0o755)
    result = collect(start(lambda: mpi.mpi(Here({"PATH": str(tmp_path)})), 30.0))
    assert result.what.endswith(", no mpiexec on the PATH, nor srun")


def test_a_missing_mpi4py_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda _name: None)
    result = mpi.mpi(Here({}))
    assert (result.status, "'.[mpich]'" in result.remedy) == ("warn", True)


def test_the_mpiexec_of_the_same_mpi_is_ok(launch: Launch) -> None:
    ended = launch([sys.executable, *DOCTOR])
    assert re.match(r"ok    mpi             \S+ is MPICH, mpi4py is bound to MPICH ", ended.stdout)
    assert ended.exit_code == 0


def test_the_mpiexec_of_another_mpi_is_a_failure(launch: Launch, openmpi_mpiexec: Path) -> None:
    path = f"{openmpi_mpiexec.parent}:{clean_environ()['PATH']}"
    ended = launch([sys.executable, *DOCTOR], env={"PATH": path})
    assert ended.stdout.startswith(
        f"fail  mpi             {openmpi_mpiexec} is Open MPI, mpi4py is bound to MPICH"
    )
    assert "MPI4PY_LIBMPI=" in ended.stdout
    assert ended.exit_code == 1


def test_an_mpi_library_that_cannot_be_loaded_fails(launch: Launch, tmp_path: Path) -> None:
    ended = launch([sys.executable, *DOCTOR], env={"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")})
    assert ended.stdout.startswith("fail  mpi             mpi4py cannot be used (")
    assert ended.exit_code == 1


def test_under_mpiexec_one_rank_per_node_prints_results(launch: Launch, mpiexec: Path) -> None:
    ended = launch([mpiexec, "-n", "2", sys.executable, *DOCTOR])
    assert ended.stdout.startswith("ok    mpi  ")
    assert ended.stdout.count("\n") == 1
    assert ended.exit_code == 0
