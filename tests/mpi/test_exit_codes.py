"""mpiexec returns the exit code of the ranks, no matter which rank ends last."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from ddp_hpc.discovery.rank_communication import wait_until_read
from tests.conftest import Launch

PROGRAM = """
import os, sys, time
from ddp_hpc.discovery.rank_communication import finalize_mpi, load_mpi
comm = load_mpi("any", "mpiexec")
delay_s, code = eval(sys.argv[1], {"rank": comm.rank})
finalize_mpi(then_exits=True)
time.sleep(delay_s)
os._exit(code)
"""


@pytest.mark.parametrize(
    ("delays_and_codes", "expected"),
    [("(0.3 * rank, 2)", 2), ("(0.3 * (2 - rank), 75 if rank == 0 else 0)", 75)],
)
def test_the_exit_code_after_mpi_finalize_is_that_of_the_ranks(
    launch: Launch, mpiexec: Path, delays_and_codes: str, expected: int
) -> None:
    # With MPICH 5.0.2 and `os._exit` alone the code is always 9: Hydra kills the ranks that end later.
    ended = launch([mpiexec, "-n", "3", sys.executable, "-c", PROGRAM, delays_and_codes])
    assert ended.exit_code == expected, ended.stderr
    assert "BAD TERMINATION" not in ended.stdout + ended.stderr or expected


def test_a_rank_waits_until_the_launcher_has_read_its_error() -> None:
    # Hydra can drop what it has not read when a rank calls MPI_Abort.
    launcher, rank = os.pipe()
    was_read = []

    def read_late() -> None:
        time.sleep(0.3)
        was_read.append(os.read(launcher, 100))

    with os.fdopen(rank, "w") as stderr, os.fdopen(launcher):
        stderr.write("error: out of memory\n")
        reader = threading.Thread(target=read_late)
        reader.start()
        wait_until_read(stderr)
        assert was_read == [b"error: out of memory\n"]
        reader.join()


def test_a_launcher_that_reads_nothing_delays_the_end_of_a_rank_by_seconds_only() -> None:
    launcher, rank = os.pipe()
    with os.fdopen(rank, "w") as stderr, os.fdopen(launcher):
        stderr.write("error: out of memory\n")
        wait_until_read(stderr)  # pytest has a time limit for each test
    wait_until_read(stderr)  # it is closed
