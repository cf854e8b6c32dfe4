"""The ranks' store: its values, its end, and how clients find it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from ddp_hpc.base.errors import RendezvousError
from ddp_hpc.rendezvous.store_client import (
    StoreLostError,
    StoreRefusedError,
    StoreTimeoutError,
    connect,
)
from ddp_hpc.rendezvous.store_process import StoreProcess
from tests.conftest import Launch
from tests.stores import HERE, Served, closed_port, store_in_process, store_in_thread

S = 10.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with store_in_process() as served:
        yield served


@contextmanager
def foreign_service(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """The port of another program; `answer` handles each connection."""
    with socket.create_server((HERE, 0)) as server:

        def one(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                answer(connection)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=one, args=server.accept()[:1]).start()

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)


# Values.


def test_a_value_is_visible_to_all_clients(shared: Served) -> None:
    writer, reader = shared.client(), shared.client()
    value = bytes(range(256)) * 100
    writer.set("a value", value, S)
    assert reader.get(["a value"], S) == [value]
    assert reader.check(["a value"], S)
    assert not reader.check(["a value", "no such key"], S)
    assert writer.delete("a value", S)
    assert not writer.delete("a value", S)
    assert not reader.check(["a value"], S)


def test_get_waits_until_all_keys_exist(shared: Served) -> None:
    waiting, setting = shared.client(), shared.client()
    got: list[list[bytes]] = []
    thread = threading.Thread(target=lambda: got.append(waiting.get(["w/1", "w/2"], S)))
    thread.start()
    setting.set("w/2", b"two", S)
    time.sleep(0.2)
    assert not got
    setting.set("w/1", b"one", S)
    thread.join(S)
    assert got == [[b"one", b"two"]]


def test_a_wait_ends_at_its_time_limit_without_effect_on_later_ones(shared: Served) -> None:
    client = shared.client()
    start_s = time.monotonic()
    with pytest.raises(
        StoreTimeoutError, match=rf"no answer from the ranks' store at {HERE}:\d+ within 0.3 s"
    ):
        client.get(["never"], 0.3)
    assert time.monotonic() - start_s < 3
    client.set("never", b"now", S)
    assert client.get(["never"], S) == [b"now"]


def test_additions_of_many_clients_are_all_counted(shared: Served) -> None:
    clients = [shared.client() for _ in range(8)]

    def add(client) -> None:
        for _ in range(50):
            client.add("count", 2, S)

    threads = [threading.Thread(target=add, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert clients[0].add("count", 0, S) == 800


def test_a_full_store_refuses_new_values_and_keeps_the_old_ones() -> None:
    with store_in_thread(max_bytes=10_000) as served:
        client = served.client()
        client.set("a", b"x" * 8000, S)
        with pytest.raises(StoreRefusedError, match=r"contains 8101 bytes; 3101 more .* limit of 10000"):
            client.set("b", b"x" * 3000, S)
        client.set("a", b"y", S)
        client.set("b", b"x" * 3000, S)
        assert client.get(["a", "b"], S) == [b"y", b"x" * 3000]


def test_a_message_that_is_too_large_is_refused_before_it_is_sent(shared: Served) -> None:
    client = shared.client()
    with pytest.raises(StoreRefusedError, match="exceeds the limit of 67108864"):
        client.set("large", bytes(70 * 2**20), S)
    assert not client.check(["large"], S)


# Ends.


def test_clients_are_notified_if_the_owner_ends_without_goodbye() -> None:
    with store_in_thread() as served:
        client, heard = served.client(), threading.Event()
        client.when_set("rank 0", lambda answer: heard.set() if answer == [b"gone"] else None)
        served.end_owner()
        assert heard.wait(S)
        assert client.add("the store is still there", 1, S) == 1
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((HERE, served.port), 1)


def test_a_value_that_is_given_again_replaces_the_old_one() -> None:
    with store_in_thread(max_bytes=700) as served:
        client = served.client()
        for text in (b"a" * 300, b"b" * 300):  # both together would exceed the limit
            client.give("k", 1, text, S)
        client.give("k", 0, b"c", S)
        assert client.given("k", S) == {0: b"c", 1: b"b" * 300}
        assert client.take("k", 2, S) == [b"c", b"b" * 300]


def test_losing_the_store_wakes_all_waiting_threads() -> None:
    with store_in_process() as served:
        client = served.client()
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                client.get(["never"], 60)
            except StoreLostError as error:
                errors.append(error)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        served.process._process.kill()
        for thread in threads:
            thread.join(S)
        assert len(errors) == 3
        assert f"lost the connection to the ranks' store at {HERE}:{served.port}" in str(errors[0])
        with pytest.raises(StoreLostError):
            client.set("a", b"b", S)


def test_signals_for_the_job_do_not_end_the_store() -> None:
    with store_in_process() as served:
        client = served.client()
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            served.process._process.send_signal(sig)
        client.set("still", b"there", S)
        assert client.get(["still"], S) == [b"there"]


def test_the_server_ends_and_closes_its_output_after_a_killed_owner(launch: Launch) -> None:
    """Launchers wait until a rank's output is closed, so the server must not keep it open."""
    code = (
        "import socket, sys, time; from ddp_hpc.rendezvous.store_process import StoreProcess;"
        "s = socket.create_server(('127.0.0.1', 0)); port = s.getsockname()[1];"
        "p = StoreProcess(s, bytes(32)); print(port, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    port = int(owner.stdout.readline())
    client = connect(HERE, [port], lambda: bytes(32), S)
    owner.kill()
    start_s = time.monotonic()
    assert owner.communicate(timeout=5) == ("", "")
    assert time.monotonic() - start_s < 4
    assert client.get(["rank 0"], S) == [b"gone"]
    client.close()


def test_a_forked_child_has_no_connection_and_does_not_close_the_parents(shared: Served) -> None:
    client = shared.client()
    child = os.fork()
    if child == 0:
        try:
            client.set("child", b"", 1)
        except StoreLostError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    client.set("parent", b"1", S)
    assert client.get(["parent"], S) == [b"1"]


def test_a_signal_during_a_call_does_not_damage_the_connection(shared: Served) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    client = shared.client()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(30):
            signal.setitimer(signal.ITIMER_REAL, 0.002 * (1 + i % 5))
            with suppress(Interrupted):
                while True:
                    client.set(f"interrupted/{i}", bytes(100_000), S)
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert client.add("after", 1, S) == 1


# Finding the server.


def test_a_store_of_another_job_is_skipped(shared: Served) -> None:
    with store_in_thread() as other:
        client = connect(HERE, [other.port, shared.port], lambda: shared.key, S)
        assert client.port == shared.port
        client.close()
        with pytest.raises(RendezvousError, match="the store on this port belongs to another job"):
            connect(HERE, [other.port], lambda: shared.key, 0.5)


def claim(connection: socket.socket) -> None:
    connection.sendall(b"ddp-hpc store 1\n" + bytes(32))
    connection.recv(64)
    connection.sendall(bytes(32))


def drip(connection: socket.socket) -> None:
    for i in range(60):
        connection.sendall(b"ddp-hpc store 1\n"[i % 16 : i % 16 + 1])
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (lambda c: c.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "the port belongs to another program"),
        (lambda c: None, "the connection was closed"),
        (claim, "it has a different key"),
        (drip, "timed out"),
    ],
    ids=["http", "closes", "claims", "drips"],
)
def test_another_program_on_the_port_is_not_mistaken_for_the_store(
    answer: Callable[[socket.socket], object], cause: str
) -> None:
    with foreign_service(answer) as port:
        start_s = time.monotonic()
        with pytest.raises(
            RendezvousError, match=rf"no answer from {HERE}, port {port}, within 1 s: .*{cause}"
        ):
            connect(HERE, [port], lambda: bytes(32), 1)
        assert time.monotonic() - start_s < 3


def test_a_client_that_starts_before_the_server_retries() -> None:
    port, key, found = closed_port(), os.urandom(32), []
    thread = threading.Thread(target=lambda: found.append(connect(HERE, [port], lambda: key, S)))
    thread.start()
    time.sleep(0.5)
    process = StoreProcess(socket.create_server((HERE, port)), key)
    thread.join(S)
    found[0].close()
    process.close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "n" * 64])
def test_a_name_that_does_not_resolve_is_reported(host: str) -> None:
    with pytest.raises(RendezvousError, match="the name does not resolve"):
        connect(host, [1], lambda: bytes(32), 0.3)
