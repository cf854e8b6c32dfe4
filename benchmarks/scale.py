"""Measures what the start of a job and a step cost rank 0 for thousands of ranks.

python benchmarks/scale.py [--ranks 64,1024,4096,16384] [--per-node 8] [--json FILE]

Every rank is a thread that runs the real code of a start: the rendezvous, the failure watch, the agreements,
the placement check and the barriers of a default run. Its connection is a real socket to the real store
server, which is a separate process; only the thread that serves the connections of ranks is shared. A second
measurement does the same for the heartbeat. The bytes, messages and connections of rank 0 are counted. Times
include the simulated ranks, which share the cores of this machine with the server; the CPU time and the
memory are those of rank 0's processes alone. The exchange of a step is measured with torch's fake process
group.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_hpc.base.process_status import process_stat
from ddp_hpc.base.text_table import Column, table
from ddp_hpc.discovery.listening_ports import sockets_of, tcp_sockets
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous import connect_ranks, store_client
from ddp_hpc.rendezvous.address import RendezvousPoint
from ddp_hpc.rendezvous.store_client import StoreClient
from ddp_hpc.rendezvous.store_comm import StoreComm

HERE = "127.0.0.1"
MOST_RANKS = 4096  # ranks of one simulating process
LIMIT_S = 1800.0
NUM_AGREEMENTS, NUM_ANSWERS = 13, 6  # of `ddp_hpc.train` with default options, besides those called below
BEATS = 5
NUM_STEPS = 5  # steps per exchange
COLUMNS = [
    Column("ranks", "ranks", "{:,}".format),
    Column("nodes", "nodes", "{:,}".format),
    Column("store_connections", "store conn.", "{:,}".format),
    Column("beat_connections", "heartbeat conn.", "{:,}".format),
    Column("messages", "messages", "{:,}".format),
    Column("in_bytes", "in MB", lambda size: f"{size / 1e6:,.1f}"),
    Column("out_bytes", "out MB", lambda size: f"{size / 1e6:,.1f}"),
    Column("start_s", "start s", "{:.1f}".format),
    Column("server_cpu_s", "server CPU s", "{:.2f}".format),
    Column("server_bytes", "server MB", lambda size: f"{size / 1e6:,.0f}"),
    Column("beat_cpu_s", "CPU s/beat", "{:.3f}".format),
    Column("exchange_s", "exchange ms", lambda seconds: f"{seconds * 1e3:.2f}"),
    Column("generator_bytes", "generators MB", lambda size: f"{size / 1e6:,.1f}"),
]


class Hub:
    """Serves the connections of all simulated ranks of this process in one thread, and counts their bytes."""

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = self.messages = 0
        self._selector, self._queue = selectors.DefaultSelector(), deque[Callable[[], None]]()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        threading.Thread(target=self._run, daemon=True).start()

    def call(self, function: Callable[[], None]) -> None:
        self._queue.append(function)
        with suppress(BlockingIOError):  # the hub will wake up anyway
            self._waker.send(b"!")

    def add(self, connection: socket.socket, on_data: Callable[[bytes], None]) -> None:
        self.call(lambda: self._selector.register(connection, selectors.EVENT_READ, on_data))

    def send(self, connection: socket.socket, data: bytes) -> None:
        try:
            connection.sendall(data)
        except OSError:
            return
        self.sent_bytes += len(data)
        self.messages += 1

    def remove(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    self._woken.recv(1 << 16)
                    continue
                assert isinstance(key.fileobj, socket.socket)
                try:
                    received = key.fileobj.recv(1 << 20)
                except OSError:
                    received = b""
                self.received_bytes += len(received)
                if not received:
                    self.remove(key.fileobj)
                key.data(received)
            while self._queue:
                self._queue.popleft()()


HUB: Hub


class LightClient(StoreClient):
    """A connection to the store whose thread is that of the hub."""

    def __init__(self, connection: socket.socket, stream: Any, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._connection, self._stream = connection, stream
        self._waiting, self._lost = {}, None
        self._numbers = itertools.count(1)
        HUB.add(connection, self._on_data)

    def _on_data(self, received: bytes) -> None:
        if not received:
            self._end(None)
        for status, request, fields in self._stream.messages(received):
            HUB.messages += 1
            self._deliver(request, store_client._answer(status, fields))

    def _post(self, op: Any, request: int, fields: list[bytes]) -> None:
        HUB.call(lambda: HUB.send(self._connection, self._stream.frame(op, request, fields)))

    def close(self) -> None:
        HUB.call(lambda: HUB.remove(self._connection))


def world_of(rank: int, num_ranks: int, per_node: int) -> World:
    node = rank // per_node
    return World(
        rank=rank, world_size=num_ranks, local_rank=rank % per_node, local_size=min(per_node, num_ranks),
        node_rank=node, num_nodes=-(-num_ranks // per_node), hostname=f"n{node}", launcher="slurm",
    )  # fmt: skip


def start_up(world: World, port: int, key: bytes) -> dict[str, float]:
    """Runs what a rank does at its start; returns what was measured on rank 0."""
    import torch

    from ddp_hpc.training.process_group import group
    from ddp_hpc.training.process_group.check_placement import check_placement
    from ddp_hpc.training.process_group.failure_watch import FailureWatch

    begin_s, measured = time.monotonic(), {}
    point, process = RendezvousPoint(HERE, [port], "scale", "", HERE), None
    if world.rank == 0:
        num_clients = world.world_size
        process, store = connect_ranks.serve_store(point, key, world.hostname, num_clients)
        connect_ranks.wait_for_ranks(
            store, list(range(1, world.world_size)), LIMIT_S, {"host": HERE, "why": ""}
        )
    else:
        joining = connect_ranks.Joining(point, lambda: key, world.rank, "a rank")
        store = joining.connect(LIMIT_S)
        joining.join(store, LIMIT_S)
    watch = FailureWatch(store, world.rank, lambda _: None, lambda _: None)
    watch.begin()
    comm = StoreComm(store, world.rank, world.world_size, LIMIT_S)
    group.agree(comm, world, group.mismatch_between_ranks(comm, "nccl on cuda"))
    comm.members(world.hostname, "ffffffffffffffff")
    check_placement(comm, world, torch.device("cpu"), "gloo")
    for _ in range(NUM_ANSWERS):
        comm.bcast(["0123456789abcdef", world.rank])
    for _ in range(NUM_AGREEMENTS):
        group.agree(comm, world, "")
    comm.gather("the host names", world.hostname)
    if process is not None:
        pid = process._process.pid
        measured = {
            "start_s": time.monotonic() - begin_s,
            "server_cpu_s": cpu_s(pid),
            "server_bytes": memory_bytes(pid),
            "store_connections": num_connections(pid),
        }
    comm.barrier("the end of training")
    watch._closed.set()
    if process is not None:
        store.goodbye(LIMIT_S)
        time.sleep(0.5)
        process.close()
    return measured


def simulate_ranks(part: int, num_ranks: int, per_node: int, port: int, key: bytes) -> dict[str, float]:
    """Runs a part of the ranks in threads of this process."""
    global HUB
    HUB = Hub()
    store_client.StoreClient = LightClient  # type: ignore[misc]
    threading.stack_size(256 * 1024)
    measured: dict[str, float] = {}

    def run(rank: int) -> None:
        world = world_of(rank, num_ranks, per_node)
        measured.update(start_up(world, port, key))

    ranks = range(part * MOST_RANKS, min((part + 1) * MOST_RANKS, num_ranks))
    if part == 0:
        import torch

        from ddp_hpc.training.process_group import group  # noqa: F401

        torch.set_num_threads(1)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = {"in_bytes": HUB.sent_bytes, "out_bytes": HUB.received_bytes, "messages": HUB.messages}
    return measured | counted


def cpu_s(pid: int) -> float:
    fields = process_stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def num_connections(pid: int) -> int:
    """Returns the number of established connections of a process, by its open sockets and /proc/net."""
    inodes = sockets_of(pid)
    rows = tcp_sockets(Path(f"/proc/{pid}/net"))
    return sum(1 for fields in rows if fields[3] == "01" and fields[9] in inodes)


def serve_heartbeats(num_ranks: int, per_node: int) -> None:
    """Runs rank 0's monitor. Reads commands from stdin: each line asks for its costs so far."""
    from ddp_hpc.rendezvous.listener import open_listener
    from ddp_hpc.training.health.heartbeat import _limits
    from ddp_hpc.training.health.heartbeat_messages import Beat
    from ddp_hpc.training.health.heartbeat_monitor import Monitor

    listener = open_listener([0], HERE)
    limits = _limits(num_ranks, 600.0, 600.0, 600.0, 60.0, 10.0)
    monitor = Monitor(
        world_of(0, num_ranks, per_node), limits, lambda _: Beat(1), (listener, "nonce"), None, print
    )
    monitor.thread.start()
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    for _ in sys.stdin:
        here = sum(1 for rank in monitor._ranks if rank.host != "an unknown node")
        costs = {
            "here": here, "cpu_s": cpu_s(os.getpid()), "bytes": memory_bytes(os.getpid()),
            "connections": num_connections(os.getpid()),
        }  # fmt: skip
        print(json.dumps(costs), flush=True)
    os._exit(0)


def measure_heartbeat(num_ranks: int, per_node: int) -> dict[str, float]:
    """Connects all ranks to the monitor, and sends beats."""
    command = [sys.executable, __file__, "--serve-heartbeats"]
    command += ["--ranks", str(num_ranks), "--per-node", str(per_node)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def ask() -> dict[str, float]:
            assert server.stdin is not None
            assert server.stdout is not None
            print(file=server.stdin, flush=True)
            return json.loads(server.stdout.readline())  # type: ignore[no-any-return]

        port = json.loads(server.stdout.readline())["port"]
        connections = [socket.create_connection((HERE, port), 60.0) for _ in range(1, num_ranks)]
        for rank, connection in enumerate(connections, start=1):
            connection.sendall(f"hello nonce {rank} n{rank // per_node}\n".encode())
        while ask()["here"] < num_ranks:
            time.sleep(0.2)
        before = ask()
        for _ in range(BEATS):
            for connection in connections:
                connection.sendall(b"at 1 0 2 0.100 600.0 backward\n")
            for connection in connections:
                assert connection.recv(1000) == b"\n"
        after = ask()
        server.stdin.close()
        for connection in connections:
            connection.close()
    return {
        "beat_cpu_s": (after["cpu_s"] - before["cpu_s"]) / BEATS,
        "beat_connections": after["connections"],
        "monitor_bytes": after["bytes"],
    }


def measure_exchange(num_ranks: int) -> dict[str, float]:
    """Measures the exchange of a step on one rank with torch's fake process group."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ddp_hpc.training.health.rank_report import RankReport
    from ddp_hpc.training.process_group.group import Group
    from ddp_hpc.training.snapshots.random_state import generator_state
    from ddp_hpc.training.step import Pending

    class Clock:
        def read(self, num_kept: int) -> list[tuple[float, float]]:  # noqa: ARG002 - as StepClock
            return [(0.0, 0.1)] * NUM_STEPS

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    world, device = world_of(0, num_ranks, 8), torch.device("cpu")
    group = Group(
        world=world,
        comm=None,
        device=device,
        backend="fake",
        threads=1,
        placement="",  # type: ignore[arg-type]
    )
    times = []
    for _ in range(5):
        pending = Pending(
            0,
            [torch.ones(())] * NUM_STEPS,
            [{"step": 1, "epoch": 0, "samples": 32, "lr": 0.1}] * NUM_STEPS,
        )
        start_s = time.process_time()
        pending.send(group, Clock(), lambda step_s: RankReport(0.0, 0.0, step_s, step_s), whole=True)  # type: ignore[arg-type]
        pending.receive()
        times.append(time.process_time() - start_s)
    return {
        "exchange_s": min(times),
        "generator_bytes": group.world.world_size * generator_state(device).numel(),
    }


def measure(num_ranks: int, per_node: int) -> dict[str, float]:
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    key = os.urandom(32).hex()
    own = [sys.executable, __file__, "--ranks", str(num_ranks), "--per-node", str(per_node)]
    num_parts = -(-num_ranks // MOST_RANKS)
    parts = [
        subprocess.Popen(
            [*own, "--part", str(part), "--port", str(port)],
            env={**os.environ, "SCALE_KEY": key}, stdout=subprocess.PIPE, text=True,
        )
        for part in range(num_parts)
    ]  # fmt: skip
    found: dict[str, float] = {"ranks": num_ranks, "nodes": -(-num_ranks // per_node)}
    for part in parts:
        output, _ = part.communicate(timeout=LIMIT_S)
        for name, value in json.loads(output).items():
            found[name] = found.get(name, 0) + value
    found |= measure_heartbeat(num_ranks, per_node)
    exchange = subprocess.run(
        [*own, "--exchange"], stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S
    )
    return found | json.loads(exchange.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", default="64,1024,4096,16384", help="numbers of ranks")
    parser.add_argument("--per-node", type=int, default=8, help="ranks per node")
    parser.add_argument("--json", type=Path, help="file for the rows")
    for name in ("--part", "--port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    for name in ("--serve-heartbeats", "--exchange"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    ranks = [int(number) for number in args.ranks.split(",")]
    if args.part is not None:
        key = bytes.fromhex(os.environ["SCALE_KEY"])
        found = simulate_ranks(args.part, ranks[0], args.per_node, args.port, key)
        print(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)
    if args.serve_heartbeats:
        serve_heartbeats(ranks[0], args.per_node)
    elif args.exchange:
        print(json.dumps(measure_exchange(ranks[0])))
    else:
        rows = []
        for number in ranks:
            rows.append(measure(number, args.per_node))
            print(json.dumps(rows[-1]), file=sys.stderr)
        print(table(COLUMNS, rows))
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
