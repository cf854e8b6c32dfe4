"""TCPStore clients of torch, as NCCL uses them, with the server of their node and the ranks' store."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from ddp_hpc.base.errors import RendezvousError
from ddp_hpc.base.process_status import process_stat
from ddp_hpc.discovery.open_files import raise_file_limit
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.connect_ranks import Endpoint
from ddp_hpc.rendezvous.frame_server import Owner
from ddp_hpc.rendezvous.listener import open_listener
from ddp_hpc.rendezvous.store_client import Answer
from ddp_hpc.rendezvous.store_comm import StoreComm
from ddp_hpc.rendezvous.store_process import TorchStoreProcess
from ddp_hpc.rendezvous.store_protocol import Op
from ddp_hpc.rendezvous.torch_store_protocol import MAGIC, QUERY_NAMES, Query
from ddp_hpc.rendezvous.torch_store_server import TorchStoreServer
from ddp_hpc.training.process_group import group_store as module
from ddp_hpc.training.process_group.group_store import OpenStore, group_store
from tests.stores import HERE, Served, store_in_process, store_in_thread
from tests.training.test_group_store import compare, torchs
from tests.waiting import wait_until

LIMIT = timedelta(seconds=10)
BRIEF = timedelta(milliseconds=100)


class Node:
    """A node with a server for torch's clients."""

    def __init__(self, served: Served) -> None:
        listener = open_listener([0], HERE)
        self.port = listener.getsockname()[1]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the node
        own = os.dup(2)
        os.dup2(self._stderr.fileno(), 2)
        try:
            self.process = TorchStoreProcess(listener, served.client(), torch.__version__)
        finally:
            os.dup2(own, 2)
            os.close(own)

    def stderr(self) -> str:
        return os.pread(self._stderr.fileno(), 2**20, 0).decode()

    def client(self, timeout: timedelta = LIMIT) -> TCPStore:
        return TCPStore(HERE, self.port, is_master=False, timeout=timeout, wait_for_workers=False)


@pytest.fixture
def served() -> Iterator[Served]:
    # A server in a thread could not answer all requests: functions of torch such as num_keys hold the GIL.
    with store_in_process() as served:
        yield served


@pytest.fixture
def counting() -> Iterator[Served]:
    with store_in_thread() as served:
        yield served


def started(served: Served, stack: ExitStack) -> Node:
    node = Node(served)
    stack.callback(node.process.close)
    return node


@pytest.fixture
def node(served: Served) -> Iterator[Node]:
    with ExitStack() as stack:
        yield started(served, stack)


def test_every_request_has_the_same_result_as_with_torchs_server(node: Node) -> None:
    compare(node.client(timedelta(seconds=5)), torchs())


def test_keys_are_listed_as_by_torchs_server(served: Served, node: Node) -> None:
    served.client().set("of the ranks", b"1", 5)
    ours, theirs = node.client(), torchs()
    for store in (ours, theirs):
        store.multi_set(["a", "b/c"], ["1", "2"])
    assert ours.num_keys() == theirs.num_keys() == 2
    if hasattr(ours, "list_keys"):  # since torch 2.9
        assert sorted(ours.list_keys()) == sorted(theirs.list_keys()) == ["a", "b/c"]


# With NCCL, DeviceMesh splits process groups, and `ProcessGroup::splitGroup` clones the store.


def on_ranks(served: Served, size: int, backend: str = "nccl", **changes: Any) -> list[OpenStore]:
    stores: list[Any] = [None] * size

    def one(rank: int) -> None:
        client = served.client()
        endpoint = Endpoint(host=HERE, why="", interface="lo", store=client, listen=HERE)
        world = World(
            **{"rank": rank, "world_size": size, "local_rank": rank % 2, "local_size": 2}
            | {"hostname": f"n{rank // 2}", "launcher": "slurm"}
            | changes
        )
        try:
            stores[rank] = group_store(endpoint, StoreComm(client, rank, size, 10.0), world, backend, 10.0)
        except RendezvousError as error:
            stores[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return stores


def test_a_client_sees_its_own_change_of_a_missing_key_at_once(node: Node) -> None:
    store = node.client()
    for change in (lambda: store.set("dump", "1"), lambda: store.multi_set(["dump"], ["1"])):
        assert not store.check(["dump"])
        assert not store.check(["dump"])
        change()
        assert store.check(["dump"])
        store.delete_key("dump")
        assert not store.check(["dump"])


def test_a_store_can_be_cloned_after_all_ranks_have_connected(served: Served) -> None:
    stores = on_ranks(served, 4)
    clones = [opened.store.clone() for opened in stores]
    clones[3].set("a", "1")
    assert [store.get("a") for store in clones] == [b"1"] * 4
    for opened in stores:
        opened.close()


def test_each_node_has_one_server_and_one_connection_to_the_ranks_store(counting: Served) -> None:
    stores = on_ranks(counting, 4)
    assert [opened.server is not None for opened in stores] == [True, False, True, False]
    assert counting.server is not None
    assert counting.server._num_clients() == 4 + 2
    for opened in stores:
        opened.close()


# Requests that wait for a key or for other clients.


def test_a_wait_that_timed_out_does_not_disturb_later_requests(node: Node) -> None:
    store = node.client()
    for _ in range(5):
        with pytest.raises(dist.DistStoreError):
            store.wait(["never"], BRIEF)
        store.set("a", "1")
        assert store.get("a") == b"1"


needs_barrier = pytest.mark.skipif(not hasattr(TCPStore, "barrier"), reason="torch 2.13 has TCPStore.barrier")


@needs_barrier
def test_a_barrier_ends_once_all_clients_have_arrived(served: Served, node: Node) -> None:
    with ExitStack() as stack:
        clients = [node.client(), node.client(), started(served, stack).client()]
        with pytest.raises(dist.DistStoreError):
            clients[0].barrier("early", 3, BRIEF)
        arrived = [
            threading.Thread(target=client.barrier, args=("all", 3, LIMIT), daemon=True) for client in clients
        ]
        for thread in arrived[:2]:
            thread.start()
        arrived[0].join(0.5)
        assert arrived[0].is_alive()
        arrived[2].start()
        for thread in arrived:
            thread.join(10)
        assert not any(thread.is_alive() for thread in arrived)
        clients[0].set("a", "1")
        assert clients[0].get("a") == b"1"


# On each rank, NCCL's monitoring thread checks every second whether a key exists.


def counted(served: Served) -> list[int]:
    """Returns a list to which the store appends each request that it receives from now on."""
    server, requests = served.server, list[int]()
    assert server is not None
    handle = server._handle

    def count(connection: Any, op: int, request: int, fields: list[bytes]) -> None:
        requests.append(op)
        handle(connection, op, request, fields)

    server._handle = count  # type: ignore[method-assign]
    return requests


def test_repeated_checks_of_a_missing_key_are_not_sent_to_rank_0(counting: Served) -> None:
    with ExitStack() as stack:
        node = started(counting, stack)
        clients = [node.client() for _ in range(4)]
        assert not clients[0].check(["dump"])
        requests = counted(counting)
        assert not any(client.check(["dump"]) for client in clients for _ in range(50))
        assert len(requests) <= 1  # the request for a notification may arrive late


def test_a_client_of_another_node_that_sets_a_missing_key_is_noticed(served: Served, node: Node) -> None:
    with ExitStack() as stack:
        store = node.client()
        assert not store.check(["dump"])
        started(served, stack).client().set("dump", "1")
        wait_until(lambda: store.check(["dump"]))


class SlowStore:
    """A stand-in for a client of the ranks' store. The test itself passes the answers to `calls`."""

    is_lost = False

    def __init__(self) -> None:
        self.calls: list[Callable[[Answer], None]] = []

    def send(self, op: Op, fields: list[bytes], call: Callable[[Answer], None]) -> int:
        del op, fields
        self.calls.append(call)
        return len(self.calls)

    def cancel(self, request: int) -> None:
        del request


@pytest.fixture
def slow() -> Iterator[tuple[TorchStoreServer, SlowStore, list[socket.socket]]]:
    """A server without a running event loop, whose methods the test calls; its store and two clients."""
    store = SlowStore()
    with socket.create_server((HERE, 0)) as listener:
        server = TorchStoreServer(listener, store, Owner(os.getppid()), "9.9")  # type: ignore[arg-type]
        clients = []
        for _ in range(2):
            clients.append(socket.create_connection(listener.getsockname()[:2], timeout=10))
            server._accept()
        yield server, store, clients
        for client in clients:
            client.close()
        for connection in list(server._connections):
            server._close(connection)


def answer(server: TorchStoreServer, call: Callable[[Answer], None], result: Answer) -> None:
    call(result)
    server._calls.get()()


def test_a_key_that_was_set_during_a_check_is_not_taken_for_missing(slow: Any) -> None:
    server, store, _ = slow
    first, second = server._connections
    server._handle(first, Query.CHECK, 1, [b"dump"])
    server._handle(second, Query.SET, 1, [b"dump", b"1"])
    answer(server, store.calls[0], [b"0"])
    server._handle(second, Query.CHECK, 2, [b"dump"])
    assert len(store.calls) == 3, "the second check is sent to the ranks' store"


# The protocol of the installed torch.


def enumerators(text: str, name: str) -> list[str]:
    """The names in an `enum class` of a C++ header, whose values are 0, 1, ..."""
    found = re.search(rf"enum class {name} : uint8_t \{{(.*?)\}}", text, re.DOTALL)
    assert found is not None, name
    return [word.strip() for word in found[1].split(",") if word.strip()]


def test_all_queries_of_the_installed_torch_are_known() -> None:
    """If this fails with a new torch, its clients may send queries that `TorchStoreServer` must support."""
    path = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/TCPStoreBackend.hpp"
    header = path.read_text()
    of_torch = dict(enumerate(enumerators(header, "QueryType")))
    assert of_torch == {number: QUERY_NAMES.get(number) for number in of_torch}
    assert enumerators(header, "CheckResponseType") == ["READY", "NOT_READY"]
    assert enumerators(header, "WaitResponseType") == ["STOP_WAITING", "WAIT_CANCELED"]
    [magic] = re.findall(r"validationMagicNumber = (0x[0-9A-F]+);", header)
    assert int(magic, 16).to_bytes(4, sys.byteorder) == MAGIC


# torch's own TCPStore instead of the server.


def test_torchs_own_store_is_used_if_the_variable_is_set(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_HPC_TORCH_STORE", "1")
    stores = on_ranks(served, 4)
    assert [opened.server for opened in stores] == [None] * 4
    stores[1].store.set("a", "1")
    assert [opened.store.clone().get("a") for opened in stores] == [b"1"] * 4
    assert not [key for key in served.client().keys(5.0) if key.startswith(("torch/", "group/"))]
    assert "DDP_HPC_TORCH_STORE=1: the ranks use torch's own TCPStore on port " in stores[0].note


# Connections of other users and of other programs.

VALIDATE, PING = b"\0" + (0x3C85F7CE).to_bytes(4, sys.byteorder), b"\x0d1234"


def strangers_answer(port: int, message: bytes, user: int | None = None) -> bytes:
    """Sends bytes from another process, which can have another user ID, and returns the first answer."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        with suppress(OSError):
            if user is not None:
                os.setuid(user)
            with socket.create_connection((HERE, port), timeout=10) as connection:
                connection.sendall(message)
                os.write(writer, connection.recv(100))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        received = answer.read()
    os.waitpid(pid, 0)
    return received


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_is_not_answered(node: Node) -> None:
    assert strangers_answer(node.port, VALIDATE + PING, user=65534) == b""
    wait_until(lambda: "127.0.0.1 that is not from a torch client of this user" in node.stderr())


@pytest.mark.parametrize(
    "message",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        VALIDATE + b"\x01" + b"\xff" * 8,
        VALIDATE + b"\x06" + b"\xff" * 8,
    ],
    ids=["HTTP", "endless key", "endless keys"],
)
def test_other_messages_close_the_connection_and_harm_nobody(node: Node, message: bytes) -> None:
    store = node.client()
    assert strangers_answer(node.port, message) == b""
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_queries_in_small_pieces_are_answered(node: Node) -> None:
    key = (5).to_bytes(8, sys.byteorder) + b"hello"
    message = VALIDATE + PING + b"\x01" + key + key + b"\x03" + key
    with socket.create_connection((HERE, node.port), timeout=10) as connection:
        for at in range(len(message)):
            connection.sendall(message[at : at + 1])
            time.sleep(0.001)
        received = b""
        while len(received) < 17:
            received += connection.recv(100)
    assert received == b"1234" + key


def test_a_query_of_a_newer_torch_is_refused_with_the_version_and_an_alternative(node: Node) -> None:
    assert strangers_answer(node.port, VALIDATE + PING + b"\x63") == b"1234"
    version = f"torch {torch.__version__} has sent the query 99, which is not supported"
    wait_until(lambda: version in node.stderr())
    assert "set DDP_HPC_TORCH_STORE=1" in node.stderr()


def test_a_value_that_is_not_a_number_ends_the_connection_as_in_torch(node: Node) -> None:
    for store in (node.client(), torchs()):
        store.set("a", "text")
        with pytest.raises(dist.DistNetworkError):
            store.add("a", 1)


# The end of the store, of the server and of its owner.


def test_clients_of_a_lost_store_get_a_network_error() -> None:
    with store_in_process() as served, ExitStack() as stack:
        node = started(served, stack)
        store = node.client()
        store.set("a", "1")
        served.process._process.kill()
        with pytest.raises(dist.DistNetworkError):
            store.get("a")
        assert node.process._process.wait(20) == 0


def test_the_server_ends_once_its_owner_and_its_clients_have_ended(node: Node) -> None:
    store = node.client()
    node.process.close()
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert node.process._process.poll() is None
    del store
    assert node.process._process.wait(20) == 0


OWNER = """
import os, signal, socket, sys
sys.path.insert(0, sys.argv[1])
from ddp_hpc.rendezvous.store_process import TorchStoreProcess
from tests.stores import HERE, store_in_process
with store_in_process() as served:
    listener = socket.create_server((HERE, 0))
    port = listener.getsockname()[1]
    server = TorchStoreProcess(listener, served.client(), "9.9")
    with socket.create_connection((HERE, port)) as client:
        client.sendall(bytes.fromhex(sys.argv[2]))
        client.recv(4)  # the server has connected to the store
    print(server._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_server_remains_after_its_owner_was_killed() -> None:
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", OWNER, root, (VALIDATE + PING).hex()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    wait_until(lambda: not process_stat(int(run.stdout)))


def test_a_server_that_cannot_be_started_is_an_error_of_all_ranks_of_the_node(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RendezvousError("no memory")

    monkeypatch.setattr(module, "TorchStoreProcess", fails)
    found = on_ranks(served, 4)
    assert found == [f"torch's store on n{node} cannot be started: no memory" for node in (0, 0, 1, 1)]


FLOOD_S, FLOOD_PER_S = 15.0, 1000


def connects_all_the_time(port: int, user: int) -> int:
    """Starts a process of another user that opens 1,000 connections per second; returns its process ID."""
    if pid := os.fork():
        return pid
    with suppress(BaseException):
        raise_file_limit()
        os.setuid(user)
        began_s, held = time.monotonic(), list[socket.socket]()
        for number in range(10**6):
            time.sleep(max(0.0, began_s + number / FLOOD_PER_S - time.monotonic()))
            with suppress(OSError):
                held.append(socket.create_connection((HERE, port), timeout=10))
            if len(held) > 15_000:
                held.pop(0).close()
    os._exit(0)


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_stranger_with_1000_connections_per_second_does_not_delay_the_next_client(node: Node) -> None:
    stranger = connects_all_the_time(node.port, 65534)
    try:
        time.sleep(FLOOD_S)
        began_s = time.monotonic()
        with socket.create_connection((HERE, node.port), timeout=200) as connection:
            connection.sendall(VALIDATE + PING)
            assert connection.recv(100) == b"1234"
        took_s = time.monotonic() - began_s
    finally:
        os.kill(stranger, signal.SIGKILL)
        os.waitpid(stranger, 0)
    assert took_s < 5
