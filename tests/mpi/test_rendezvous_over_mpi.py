"""Ranks under mpiexec connect to rank 0, or all end with one line that states the reason."""

from pathlib import Path

import pytest

from tests.conftest import Launch

from .conftest import CONNECT, OPENMPI_SETTINGS, ConnectRanks, errors, printed


def test_four_ranks_connect_to_the_store_that_rank_0_serves(connect_ranks: ConnectRanks) -> None:
    ranks = printed(connect_ranks(4))
    assert [each["rank"] for each in ranks] == [0, 1, 2, 3]
    assert {(each["host"], each["why"]) for each in ranks} == {("127.0.0.1", "all ranks are on one node")}
    assert len({each["port"] for each in ranks}) == 1
    assert [each["serves"] for each in ranks] == [True, False, False, False]
    assert {each["interface"] for each in ranks} == {"lo"}


@pytest.mark.check
def test_ranks_of_open_mpi_connect_too(launch: Launch, openmpi_python: Path, openmpi_mpiexec: Path) -> None:
    ended = launch([openmpi_mpiexec, "-n", "2", openmpi_python, *CONNECT], env=OPENMPI_SETTINGS)
    ranks = printed(ended)
    assert {each["launcher"] for each in ranks} == {"openmpi"}
    assert len({each["port"] for each in ranks}) == 1


def test_a_master_addr_of_another_host_is_refused_at_once_by_one_line(connect_ranks: ConnectRanks) -> None:
    ended = connect_ranks(3, MASTER_ADDR="192.0.2.1")
    (line,) = errors(ended)
    assert "MASTER_ADDR=192.0.2.1 is not an address of" in line
    assert "where rank 0 runs" in line
    assert "unset it" in line
    assert ended.exit_code == 1
    assert ended.wall_s < 10


def test_a_rank_that_never_calls_mpi_init_does_not_leave_the_others_waiting(
    connect_ranks: ConnectRanks,
) -> None:
    ended = connect_ranks(3, CONNECT_SLEEPS="1", CONNECT_WATCHDOG_S="2")
    assert "error: waited 2 s in MPI_Init for the other ranks" in ended.stderr
    assert ended.exit_code != 0
    assert ended.wall_s < 10
