"""The candidate ports, and the addresses on which listeners are open."""

import errno
import socket
import sys
from contextlib import ExitStack

import pytest

from ddp_hpc.base.errors import RendezvousError
from ddp_hpc.rendezvous.listener import candidate_ports, open_listener
from tests.conftest import Launch

HERE = "127.0.0.1"


def test_candidate_ports_are_equal_within_a_job_and_differ_between_jobs() -> None:
    assert candidate_ports("slurm-1.0.0") == candidate_ports("slurm-1.0.0")
    assert candidate_ports("slurm-1.0.0") != candidate_ports("slurm-2.0.0")


def test_candidate_ports_are_below_the_ephemeral_range() -> None:
    for job in range(1000):
        ports = candidate_ports(f"slurm-{job}.0.0")
        assert len(set(ports)) == len(ports) == 32
        assert all(20000 <= port < 32000 for port in ports)


def test_a_candidate_port_in_use_is_skipped() -> None:
    with ExitStack() as stack:
        first, second = candidate_ports("taken-test")[:2]
        stack.enter_context(socket.create_server((HERE, first)))
        listener = stack.enter_context(open_listener([first, second], HERE))
        assert listener.getsockname()[1] == second


def test_a_requested_port_in_use_is_reported() -> None:
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"port {port} of .* is used .*unset MASTER_PORT"):
            open_listener([port], HERE)


@pytest.mark.parametrize("address", [HERE, "localhost"])
def test_a_listener_on_one_address_is_not_open_on_others(address: str) -> None:
    with open_listener([0], address) as listener:
        assert listener.getsockname()[0] in (HERE, "::1")


def test_listening_on_an_address_of_another_host_fails() -> None:
    with pytest.raises(RendezvousError, match=r"cannot listen on port 0 of 192\.0\.2\.1"):
        open_listener([0], "192.0.2.1")


def test_a_listener_on_all_addresses_accepts_ipv4_and_ipv6() -> None:
    with open_listener([0]) as listener:
        socket.create_connection((HERE, listener.getsockname()[1]), 2).close()
        with pytest.raises(OSError) as caught, socket.socket() as other:  # noqa: PT011 - errno is checked
            other.bind(("", listener.getsockname()[1]))
        assert caught.value.errno == errno.EADDRINUSE


def test_a_limit_on_open_files_that_is_too_low_for_the_ranks_is_reported(launch: Launch) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 1000));"
        "from ddp_hpc.rendezvous.listener import open_listener;"
        "open_listener([0], '127.0.0.1', 900).close(); print(resource.getrlimit(resource.RLIMIT_NOFILE));"
        "open_listener([0], '127.0.0.1', 901)"
    )
    ended = launch([sys.executable, "-c", code])
    assert ended.stdout == "(1000, 1000)\n"  # the soft limit was raised
    line = ended.stderr.splitlines()[-1]
    assert "rank 0 needs 1001 open files for 901 connections from ranks, but the hard limit on" in line
    assert "is 1000 (ulimit -Hn)" in line
