"""The command under a launcher: several ranks are refused, and one process needs no MPI."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import PROJECT

COMMAND = (sys.executable, "-m", "data_gen", "--num-samples", "2")


def test_several_ranks_of_the_command_are_refused_in_one_line(tmp_path, launch, mpiexec):
    done = launch([mpiexec, "-n", "2", *COMMAND], cwd=tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "started 2 ranks, but data_gen writes a file with one process" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"MPI_LOCALRANKID": "0", "PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
    ids=["batch shell", "mpiexec -n 1"],
)
def test_one_process_does_not_use_mpi(tmp_path, variables):
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "sys.argv = ['data_gen', '--num-samples', '2', '--output', 'file.h5']\n"
        "from data_gen.cli import main\n"
        "main()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(PROJECT), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "file.h5\n")
