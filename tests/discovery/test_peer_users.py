"""The user at the other end of a connection on this host, from the kernel's diagnosis and from its tables."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ddp_hpc.discovery import peer_users
from ddp_hpc.discovery.listening_ports import tcp_sockets
from ddp_hpc.discovery.peer_users import SocketDiagnosis, open_diagnosis, users_of_peers

HERE = "127.0.0.1"
OTHER_USER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can have a connection of another user")
families = pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])


@contextmanager
def connected(family: socket.AddressFamily = socket.AF_INET) -> Iterator[tuple[socket.socket, ...]]:
    """A listening socket, a client and its accepted connection."""
    with socket.create_server((HERE, 0)) as listener, socket.socket(family) as client:
        host = HERE if family == socket.AF_INET else f"::ffff:{HERE}"
        client.connect((host, listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with accepted:
            yield listener, client, accepted


@pytest.fixture(params=["diagnosis", "tables"])
def with_diagnosis(request: pytest.FixtureRequest) -> bool:
    return str(request.param) == "diagnosis"


def diagnosis_of(listener: socket.socket, with_diagnosis: bool) -> SocketDiagnosis | None:
    if not with_diagnosis:
        return None
    diagnosis = open_diagnosis(listener)
    if diagnosis is None:
        pytest.skip("this kernel has no sock_diag for TCP")
    return diagnosis


@families
def test_the_user_of_a_connection_is_known(family: socket.AddressFamily, with_diagnosis: bool) -> None:
    with connected(family) as (listener, _, accepted):
        assert users_of_peers([accepted], diagnosis_of(listener, with_diagnosis)) == [os.geteuid()]


@families
def test_on_a_system_without_ipv6_there_is_one_table(tmp_path: Path, family: socket.AddressFamily) -> None:
    with connected(family) as (_, _, accepted):
        name = "tcp" if family == socket.AF_INET else "tcp6"
        (tmp_path / name).write_text(Path(f"/proc/self/net/{name}").read_text())
        assert users_of_peers([accepted], None, tmp_path) == [os.geteuid()]
        (tmp_path / name).write_text("")
        assert users_of_peers([accepted], None, tmp_path) == [None]


@needs_root
def test_another_user_is_recognized(with_diagnosis: bool) -> None:
    with socket.create_server((HERE, 0)) as listener:
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                os.close(writer)
                os.setuid(OTHER_USER)
                with socket.socket() as client:
                    client.connect(listener.getsockname())
                    os.read(reader, 1)  # until the parent closes the pipe
            finally:
                os._exit(0)
        listener.settimeout(20)
        accepted, _ = listener.accept()
        with accepted:
            users = users_of_peers([accepted], diagnosis_of(listener, with_diagnosis))
        os.close(writer)
        os.waitpid(pid, 0)
        assert users == [OTHER_USER]


def test_a_peer_that_has_closed_its_connection_is_unknown(with_diagnosis: bool) -> None:
    """The kernel lists its socket with the user ID 0, which is that of root."""
    with connected() as (listener, client, accepted):
        client.close()
        assert users_of_peers([accepted], diagnosis_of(listener, with_diagnosis)) == [None]


def test_an_accepted_connection_that_has_ended_is_unknown(with_diagnosis: bool) -> None:
    with connected() as (listener, _, accepted):
        accepted.close()
        assert users_of_peers([accepted], diagnosis_of(listener, with_diagnosis)) == [None]


def test_the_tables_are_read_once_for_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = []

    def counting(tables: Path) -> Iterator[list[str]]:
        readings.append(tables)
        return tcp_sockets(tables)

    monkeypatch.setattr(peer_users, "tcp_sockets", counting)
    with ExitStack() as stack:
        accepted = [stack.enter_context(connected())[2] for _ in range(20)]
        assert users_of_peers(accepted, None) == [os.geteuid()] * 20
    assert len(readings) == 1


def test_without_sock_diag_the_tables_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(93, "Protocol not supported")

    with connected() as (listener, _, accepted):
        diagnosis = open_diagnosis(listener)
        monkeypatch.setattr(SocketDiagnosis, "_ask", fails)
        assert open_diagnosis(listener) is None
        assert users_of_peers([accepted], diagnosis) == [os.geteuid()]
