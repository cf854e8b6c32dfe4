"""mpi4py of one MPI under the mpiexec of another: the most common broken launch, in both directions."""

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import Launch

from .conftest import OPENMPI_SETTINGS, errors

ENV = ("-m", "ddp_hpc", "env", "--json")


@pytest.mark.check
def test_mpi4py_of_open_mpi_under_mpich_is_refused_as_singletons(
    launch: Launch, mpiexec: Path, openmpi_python: Path
) -> None:
    ended = launch([mpiexec, "-n", "2", openmpi_python, *ENV], env=OPENMPI_SETTINGS)
    text = errors(ended)[0]
    assert "MPICH Hydra started 2 ranks (PMI_SIZE), but MPI reports 1: 2 singletons" in text
    assert "mpi4py is bound to Open MPI v5" in text
    assert f"{openmpi_python.parents[1] / 'lib'}/libmpi.so" in text
    assert f"use its mpiexec ({openmpi_python.parent / 'mpiexec'})" in text
    assert "MPI4PY_LIBMPI=" in text
    assert ended.exit_code == 2
    assert ended.stdout == ""
    assert ended.wall_s < 15


def test_mpi4py_of_mpich_under_open_mpi_is_refused_before_mpi_init(
    launch: Launch, openmpi_mpiexec: Path, mpiexec: Path
) -> None:
    ended = launch([openmpi_mpiexec, "-n", "2", sys.executable, *ENV], env=OPENMPI_SETTINGS)
    text = errors(ended)[0]
    assert "mpi4py is bound to MPICH" in text
    assert "but Open MPI does not start ranks of that library" in text
    assert f"use its mpiexec ({mpiexec})" in text
    assert ended.exit_code == 2
    assert ended.stdout == ""
    assert ended.wall_s < 15


@pytest.mark.check
@pytest.mark.parametrize("which", ["mpich", "openmpi"])
def test_each_mpi4py_works_with_its_own_mpiexec(
    launch: Launch, which: str, mpiexec: Path, openmpi_python: Path, openmpi_mpiexec: Path
) -> None:
    program, python = {
        "mpich": (mpiexec, Path(sys.executable)),
        "openmpi": (openmpi_mpiexec, openmpi_python),
    }[which]
    ended = launch([program, "-n", "3", python, *ENV], env=OPENMPI_SETTINGS)
    assert ended.exit_code == 0, ended.stderr
    values = [json.loads(line)["values"] for line in ended.stdout.splitlines()]
    assert sorted(each["rank"] for each in values) == [0, 1, 2]
    assert {each["world_size"] for each in values} == {3}
    assert sorted(each["local_rank"] for each in values) == [0, 1, 2]
