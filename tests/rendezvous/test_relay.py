"""The relay of a node, with which its ranks share one connection to the store.

`test_store.py` tests the requests through a relay, too, and `tests/training/test_heartbeat.py` the heartbeat.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from ddp_hpc.base.errors import RendezvousError, RequestError
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous import node_relay
from ddp_hpc.rendezvous.node_relay import connect_through_relay, num_connections, uses_relay
from ddp_hpc.rendezvous.store_client import StoreClient, StoreLostError, connect
from ddp_hpc.rendezvous.store_comm import StoreComm
from ddp_hpc.rendezvous.store_process import RelayProcess
from ddp_hpc.rendezvous.store_protocol import CHALLENGE_BYTES, Op
from tests.stores import HERE, WILL, Served, store_in_process, store_in_thread

S = 10.0


@pytest.fixture
def served() -> Iterator[Served]:
    """A store in a thread of the test, behind a relay."""
    with store_in_thread() as served:
        served.start_relay()
        yield served


def requests_of(served: Served) -> list[tuple[Op, list[bytes]]]:
    """Returns a list to which the requests are added that the store receives from now on."""
    assert served.server is not None
    seen: list[tuple[Op, list[bytes]]] = []
    handle = served.server._handle

    def record(connection: object, op: int, request: int, fields: list[bytes]) -> None:
        seen.append((Op(op), fields))
        handle(connection, op, request, fields)  # type: ignore[arg-type]

    served.server._handle = record  # type: ignore[method-assign]
    return seen


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    answers: list[object] = []

    def body() -> None:
        try:
            answers.append(call())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, answers


# What the store receives.


def test_all_ranks_of_a_node_have_one_connection_to_the_store(served: Served) -> None:
    for number in range(8):
        served.client().set(f"rank {number}", b"", S)
    assert served.server is not None
    assert len(served.server._connections) == 1


def test_the_ranks_of_a_node_give_their_values_in_few_messages(served: Served) -> None:
    """One message, unless the threads of this test start more than 20 ms apart on a busy machine."""
    clients = [served.client() for _ in range(8)]
    clients[0].set("all are connected", b"", S)
    seen = requests_of(served)
    threads = [in_thread(lambda n=n: clients[n].give("k", n, b"v%d" % n, S))[0] for n in range(8)]
    for thread in threads:
        thread.join(S)
    assert {op for op, _ in seen} == {Op.GIVE}
    assert len(seen) <= 4
    assert clients[0].take("k", 8, S) == [b"v%d" % n for n in range(8)]


def test_values_of_some_ranks_do_not_wait_for_the_others(served: Served) -> None:
    clients = [served.client() for _ in range(8)]
    clients[3].give("k", 3, b"v", S)
    assert clients[0].given("k", S) == {3: b"v"}


def test_ranks_that_wait_for_a_shared_key_send_one_request(served: Served) -> None:
    clients, setting = [served.client() for _ in range(4)], served.client()
    seen = requests_of(served)
    waiting = [in_thread(lambda client=client: client.get_shared("k", S)) for client in clients]
    until(lambda: seen)
    time.sleep(0.3)
    assert [op for op, _ in seen] == [Op.GET_SHARED]
    setting.set("k", b"v", S)
    for thread, _ in waiting:
        thread.join(S)
    assert [answers for _, answers in waiting] == [[b"v"]] * 4


def test_a_rank_that_reads_after_it_has_written_does_not_get_an_older_value(served: Served) -> None:
    clients = [served.client() for _ in range(4)]

    def count(client: StoreClient) -> None:
        for _ in range(50):
            written = client.add("k", 1, S)
            assert int(client.get(["k"], S)[0]) >= written

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, clients))


def test_the_waits_of_a_rank_that_has_ended_are_cancelled(served: Served) -> None:
    ending, staying = served.client(), served.client()
    in_thread(lambda: ending.get(["never"], S))
    thread, answers = in_thread(lambda: staying.get(["later"], S))
    assert served.server is not None
    waiting = served.server._waiting
    until(lambda: set(waiting) == {b"never", b"later"})
    ending.close()
    until(lambda: set(waiting) == {b"later"})
    staying.set("later", b"v", S)
    thread.join(S)
    assert answers == [[b"v"]]


def test_one_of_two_waits_for_a_shared_key_can_be_cancelled(served: Served) -> None:
    ending, staying = served.client(), served.client()
    thread, answers = in_thread(lambda: staying.get_shared("k", S))
    with pytest.raises(RendezvousError, match="no answer"):
        ending.get_shared("k", 0.2)
    ending.set("k", b"v", S)
    thread.join(S)
    assert answers == [b"v"]


def test_ranks_on_two_nodes_and_rank_0_combine_their_values() -> None:
    with store_in_process() as served:
        clients = [served.client()]
        for _ in range(2):
            served.start_relay()
            clients += [served.client() for _ in range(3)]
        comms = [StoreComm(client, rank, 7, S) for rank, client in enumerate(clients)]
        with ThreadPoolExecutor(7) as pool:
            for _ in range(20):
                sums = pool.map(lambda comm: comm.combine(comm.rank, sum), comms)
                assert list(sums) == [21] * 7


# Failures.


def test_ranks_whose_relay_is_killed_connect_to_the_store(served: Served) -> None:
    clients = [served.client() for _ in range(4)]
    waiting = [in_thread(lambda client=client: client.get(["k"], S)) for client in clients[1:]]
    clients[0].set("before", b"1", S)
    served.kill_relay()
    clients[0].set("k", b"v", S)
    for thread, _ in waiting:
        thread.join(S)
    assert [answers for _, answers in waiting] == [[[b"v"]]] * 3
    assert clients[0].get(["before"], S) == [b"1"]
    assert clients[0].add("count", 1, S) == 1
    assert all(client.relay is None for client in clients)


def test_the_end_of_rank_0_is_reported_through_the_relay(served: Served) -> None:
    client = served.client()
    thread, answers = in_thread(lambda: client.get([WILL[0]], S))
    client.set("the wait has arrived", b"", S)
    served.end_owner()
    thread.join(S)
    assert answers == [[WILL[1].encode()]]


def test_the_loss_of_the_store_is_reported_to_all_ranks_and_they_do_not_connect_again() -> None:
    with store_in_process() as served:
        served.start_relay()
        clients = [served.client() for _ in range(3)]
        waiting = [in_thread(lambda client=client: client.get(["never"], S)) for client in clients]
        clients[0].set("the waits have arrived", b"", S)
        assert served.process is not None
        served.process._process.kill()
        for thread, _ in waiting:
            thread.join(S)
        for _, (error,) in waiting:
            assert isinstance(error, StoreLostError)
            assert f"lost the connection to the ranks' store at {HERE}:{served.port}" in str(error)
        with pytest.raises(StoreLostError):
            clients[0].set("a", b"b", S)
        assert served.relay_process is not None
        assert served.relay_process._process.wait(S) == 0


def test_a_relay_serves_its_ranks_after_the_rank_that_started_it_has_ended(served: Served) -> None:
    client = served.client()
    assert served.relay_process is not None
    served.relay_process.close()
    time.sleep(0.3)
    client.set("a", b"b", S)
    assert client.relay is not None
    client.close()
    assert served.relay_process._process.wait(S) == 0


def test_a_process_without_the_key_is_rejected_by_the_relay(served: Served) -> None:
    rank = served.client()
    assert served.relay is not None
    for message in (bytes(64), b"GET / HTTP/1.1\r\n\r\n" * 10):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.settimeout(S)
            stranger.connect(served.relay.address)
            assert len(stranger.recv(CHALLENGE_BYTES)) == CHALLENGE_BYTES
            stranger.sendall(message)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    rank.set("a", b"b", S)
    assert rank.keys(S) == ["a"]


def test_idle_processes_without_the_key_do_not_block_a_rank(served: Served) -> None:
    served.client()
    assert served.relay is not None
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(700)]
    try:
        for stranger in strangers:
            stranger.connect(served.relay.address)
        served.client().set("a", b"b", S)
    finally:
        for stranger in strangers:
            stranger.close()


# How ranks find the relay.


def directly(served: Served) -> Callable[[float], StoreClient]:
    return lambda limit_s: connect(HERE, [served.port], lambda: served.key, limit_s)


def connect_ranks_of_node(
    served: Served, num_ranks: int, node: str = "n0"
) -> tuple[list[StoreClient], list[RelayProcess]]:
    def of_rank(_: int) -> tuple[StoreClient, RelayProcess | None]:
        return connect_through_relay(served.key, node, directly(served), 30.0)

    with ThreadPoolExecutor(num_ranks) as pool:
        found = list(pool.map(of_rank, range(num_ranks)))
    served.clients += [client for client, _ in found]
    return [client for client, _ in found], [process for _, process in found if process is not None]


@pytest.fixture
def store() -> Iterator[Served]:
    with store_in_thread() as served:
        yield served


def test_one_rank_of_each_node_starts_a_relay_and_the_others_use_it(store: Served) -> None:
    clients, processes = [], []
    for node in ("n0", "n1"):
        of_node, started = connect_ranks_of_node(store, 4, node)
        assert len(started) == 1
        clients, processes = clients + of_node, processes + started
    clients[0].set("a", b"b", S)
    assert [client.get(["a"], S) for client in clients] == [[b"b"]] * 8
    assert {(client.host, client.port) for client in clients} == {(HERE, store.port)}
    assert store.server is not None
    until(lambda: len(store.server._connections) == 2)  # type: ignore[union-attr]
    for process in processes:
        process.close()


@pytest.mark.parametrize("name", ["/nonexistent/ddp-hpc", "\0" + "x" * 200], ids=["not writable", "too long"])
def test_ranks_that_cannot_have_a_relay_connect_directly(
    store: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_relay, "_name", lambda *_: name)
    clients, processes = connect_ranks_of_node(store, 2)
    assert processes == []
    clients[0].set("a", b"b", S)
    assert clients[1].get(["a"], S) == [b"b"]


@pytest.mark.parametrize("answers", [True, False])
def test_another_program_with_the_name_of_the_relay_is_not_used(
    store: Served, *, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_relay, "_START_S", 1.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(node_relay._name(store.key, "n0"))
        other.listen(8)
        if answers:
            in_thread(lambda: other.accept()[0].sendall(bytes(4096)))
        client, process = connect_through_relay(store.key, "n0", directly(store), 3.0)
    store.clients.append(client)
    assert process is None
    assert client.relay is None
    client.set("a", b"b", S)


def test_another_rank_starts_the_relay_if_the_first_one_fails(store: Served) -> None:
    is_listening, may_fail = threading.Event(), threading.Event()

    def fail(limit_s: float) -> StoreClient:
        del limit_s
        is_listening.set()
        may_fail.wait(S)
        raise RendezvousError("no network on this rank")

    first, answers = in_thread(lambda: connect_through_relay(store.key, "n0", fail, 30.0))
    is_listening.wait(S)
    second, found = in_thread(lambda: connect_ranks_of_node(store, 1))
    time.sleep(0.3)
    may_fail.set()
    first.join(S)
    second.join(S)
    assert isinstance(answers[0], RendezvousError)
    clients, processes = found[0]  # type: ignore[misc]
    clients[0].set("a", b"b", S)
    assert len(processes) == 1
    processes[0].close()


def world(size: int, local_size: int) -> World:
    return World(
        rank=0, world_size=size, local_rank=0, local_size=local_size, hostname="n0", launcher="slurm"
    )


@pytest.mark.parametrize(
    ("size", "local_size", "environ", "used"),
    [
        (511, 8, {}, False),
        (512, 8, {}, True),
        (512, 1, {}, False),
        (4, 2, {"DDP_HPC_RELAY": "1"}, True),
        (4, 1, {"DDP_HPC_RELAY": "1"}, False),
        (4096, 8, {"DDP_HPC_RELAY": "0"}, False),
    ],
)
def test_relays_are_used_from_512_ranks_on(
    size: int, local_size: int, environ: dict[str, str], *, used: bool
) -> None:
    assert uses_relay(world(size, local_size), environ) is used


def test_an_unknown_value_of_the_variable_is_rejected() -> None:
    with pytest.raises(RequestError, match="DDP_HPC_RELAY='yes' is not valid; use 1 or 0"):
        uses_relay(world(4, 2), {"DDP_HPC_RELAY": "yes"})


def test_rank_0_expects_two_connections_per_node_and_those_of_its_own_node() -> None:
    assert num_connections(world(16384, 8), {}) == 4104
    assert num_connections(world(16384, 1), {}) == 16384
