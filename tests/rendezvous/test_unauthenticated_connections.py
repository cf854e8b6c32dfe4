"""Connections without the job's key to the ranks' store are rejected."""

import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_hpc.rendezvous import frame_server
from ddp_hpc.rendezvous.store_protocol import (
    CHALLENGE_BYTES,
    GREETING,
    PROOF_BYTES,
    FrameStream,
    Op,
    ProtocolError,
    response,
    stream_keys,
)
from tests.stores import HERE, Served, store_in_process, store_in_thread

S = 10.0


@pytest.fixture
def served() -> Iterator[Served]:
    with store_in_thread() as served:
        yield served


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes and (piece := connection.recv(num_bytes - len(received))):
        received += piece
    return received


def connect_as_stranger(served: Served) -> tuple[socket.socket, bytes]:
    """Returns a connection and the server's nonce."""
    connection = socket.create_connection((HERE, served.port), S)
    return connection, receive(connection, CHALLENGE_BYTES)[len(GREETING) :]


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(S)
    try:
        return connection.recv(1 << 20) == b""
    except ConnectionResetError:
        return True


def frame(op: Op, *fields: bytes) -> bytes:
    return FrameStream(bytes(32), bytes(32)).frame(op, 1, fields)


@pytest.mark.parametrize(
    "request_",
    [
        frame(Op.GET, b"secret"),
        frame(Op.SET, b"secret", b"replaced"),
        frame(Op.GOODBYE),
        b"GET / HTTP/1.1\r\n\r\n" * 10,
    ],
    ids=["read", "overwrite", "goodbye", "http"],
)
def test_a_request_without_the_key_is_not_answered(served: Served, request_: bytes) -> None:
    rank = served.client()
    rank.set("secret", b"value", S)
    for sends_a_nonce in (True, False):
        stranger, _ = connect_as_stranger(served)
        with stranger:
            stranger.sendall((os.urandom(64) if sends_a_nonce else b"") + request_ + bytes(64))
            assert is_closed(stranger)
    assert rank.get(["secret"], S) == [b"value"]


def test_warnings_about_unauthenticated_connections_become_rarer(served: Served) -> None:
    for _ in range(25):
        stranger, _ = connect_as_stranger(served)
        with stranger:
            stranger.sendall(bytes(64))
            assert is_closed(stranger)
    assert len(served.warnings) == 2
    assert "rejected a connection from 127.0.0.1 without this job's key" in served.warnings[0]
    assert "(10 so far)" in served.warnings[1]


def test_a_check_whether_the_port_is_open_causes_no_warning(served: Served) -> None:
    socket.create_connection((HERE, served.port)).close()
    served.client().set("a", b"b", S)
    assert served.warnings == []


def test_a_proof_from_another_connection_is_rejected(served: Served) -> None:
    first, nonce = connect_as_stranger(served)
    proof = response(served.key, nonce, bytes(32))
    with first:
        first.sendall(proof)
        assert len(receive(first, PROOF_BYTES)) == PROOF_BYTES
    second, _ = connect_as_stranger(served)
    with second:
        second.sendall(proof)
        assert is_closed(second)


def test_the_servers_own_proof_is_rejected(served: Served) -> None:
    """A reflection attack: the attacker sends the server's own proof back to it."""
    stranger, nonce = connect_as_stranger(served)
    with stranger:
        stranger.sendall(nonce + nonce)
        assert is_closed(stranger)


def test_a_man_in_the_middle_cannot_change_repeat_or_add_frames() -> None:
    key, nonces = os.urandom(32), (os.urandom(32), os.urandom(32))
    of_client, of_server = stream_keys(key, *nonces)
    assert of_client != of_server
    writer = FrameStream(of_client, of_server)
    first, second = writer.frame(Op.SET, 1, [b"a", b"b"]), writer.frame(Op.SET, 2, [b"a", b"c"])
    assert [fields for _, _, fields in FrameStream(of_server, of_client).messages(first + second)] == [
        [b"a", b"b"],
        [b"a", b"c"],
    ]
    for stream in (
        first + first,
        second,
        first[:-1] + b"x",
        first + FrameStream(of_server, of_client).frame(1, 2, []),
    ):
        with pytest.raises(ProtocolError, match="wrong MAC"):
            list(FrameStream(of_server, of_client).messages(stream))


def test_an_idle_unauthenticated_connection_is_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_server, "HANDSHAKE_S", 0.5)
    stranger, _ = connect_as_stranger(served)
    with stranger:
        stranger.sendall(bytes(63))
        start_s = time.monotonic()
        assert is_closed(stranger)
        assert 0.3 < time.monotonic() - start_s < 5


def test_many_idle_unauthenticated_connections_do_not_block_a_rank() -> None:
    """More connections than the server can open files: the oldest ones are closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    strangers: list[socket.socket] = []
    try:
        with store_in_process() as served:
            before = served.client()
            strangers += [socket.create_connection((HERE, served.port), S) for _ in range(1500)]
            after = served.client()
            after.set("a", b"b", S)
            assert before.get(["a"], S) == [b"b"]
    finally:
        for stranger in strangers:
            stranger.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_as_many_handshakes_as_there_are_ranks_may_be_incomplete_at_once() -> None:
    ranks: list[socket.socket] = []
    try:
        with store_in_process(num_clients=700) as served:
            first, nonce = connect_as_stranger(served)
            ranks += [first, *(connect_as_stranger(served)[0] for _ in range(650))]
            first.sendall(response(served.key, nonce, bytes(32)))
            assert len(receive(first, PROOF_BYTES)) == PROOF_BYTES
    finally:
        for rank in ranks:
            rank.close()


def test_unauthenticated_connections_do_not_fill_the_servers_memory() -> None:
    with store_in_process() as served:
        rank = served.client()
        pid = served.process._process.pid
        before = resident_bytes(pid)
        for _ in range(50):
            stranger, _ = connect_as_stranger(served)
            with stranger:
                stranger.settimeout(2)
                try:
                    for _ in range(16):
                        stranger.sendall(bytes(2**20))
                except OSError:
                    pass
        rank.set("a", b"b", S)
        assert resident_bytes(pid) - before < 4 * 2**20


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_key_is_in_no_argument_or_variable_of_the_server() -> None:
    with store_in_process() as served:
        served.client()
        process = Path(f"/proc/{served.process._process.pid}")
        seen = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        assert served.key not in seen
        assert served.key.hex().encode() not in seen
