"""The rendezvous: rank 0 starts a key-value store, and all ranks connect to it with the job's key.

The rendezvous needs neither a fixed port nor the output of `hostname`. Before torch is imported, each rank
has a connection to the store, and both sides have proved that they belong to this job.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ddp_hpc.base.errors import RendezvousError, ReportedElsewhereError, stop_together
from ddp_hpc.base.log_message import log_message
from ddp_hpc.discovery.launcher_environment import Environ
from ddp_hpc.discovery.network_interfaces import (
    fabric_interface,
    interface_of,
    is_own_address,
    local_address_towards,
    outward_interfaces,
)
from ddp_hpc.discovery.rank_communication import Comm, first_text
from ddp_hpc.discovery.watchdog import Watchdog
from ddp_hpc.discovery.world import World, short_hostname
from ddp_hpc.rendezvous.address import (
    BY_HAND,
    LOOPBACK,
    RendezvousPoint,
    choose_address,
    read_port,
    rendezvous_point,
)
from ddp_hpc.rendezvous.launch_secret import new_secret, shared_secret
from ddp_hpc.rendezvous.listener import open_listener
from ddp_hpc.rendezvous.store_client import Answer, StoreClient, connect
from ddp_hpc.rendezvous.store_process import StoreProcess

RANK_0_GONE = ("rank 0", "gone")
"""The key and the value that the server sets when rank 0 ends without `StoreClient.goodbye`."""
_CONNECT_S = 20.0  # rank 0 already listens when the others start, so a longer wait would not help
_RANKS_PER_S = 100  # a cautious estimate of how many ranks rank 0 can accept per second
_LATER_S = 10.0  # the other ranks wait longer, so that rank 0, which knows the missing ranks, reports first
_ANSWER_S = 20.0
_RETRY_S = 0.2
_SHARED = "rendezvous"
_DUPLICATE = f"{_SHARED}/duplicate"  # the number and the name of a process whose rank had already joined
_SEPARATE = "Use another MASTER_PORT for each launch, or export a different DDP_HPC_LAUNCH in each"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address of rank 0, and this rank's connection to the store on rank 0."""

    host: str
    why: str  # the reason for this address
    interface: str | None  # this host's network interface that leads to rank 0
    store: StoreClient
    process: StoreProcess | None = None  # on rank 0: the store's server
    listen: str = ""  # on rank 0: the address for further listening sockets; empty: all addresses
    note: str = ""  # a note to print for the user; empty if there is none

    @property
    def port(self) -> int:
        """The store's port."""
        return self.store.port

    def close(self) -> None:
        """Closes the connection to the store, and the server of this rank. Not collective; never raises."""
        self.store.close()
        if self.process is not None:
            self.process.close()


def endpoint_of_one_rank() -> Endpoint:
    """Returns an endpoint that only this process uses, for a process group of one rank."""
    listener, key = open_listener([0], LOOPBACK), new_secret()
    port = listener.getsockname()[1]
    process = StoreProcess(listener, key, RANK_0_GONE)
    store = connect(LOOPBACK, [port], lambda: key, _CONNECT_S)
    return Endpoint(
        host=LOOPBACK, why="one rank", interface="lo", store=store, process=process, listen=LOOPBACK
    )


def rendezvous(world: World, environ: Environ, timeout_s: float, watchdog: Watchdog) -> Endpoint | None:
    """Connects all ranks and returns their endpoint; None in a world of one rank.

    Collective: every rank must call this.

    Raises:
        RendezvousError: on rank 0 (ReportedElsewhereError on the others). It names the ranks that did
            not connect or cannot reach rank 0, with its port, the network interface and the cause.
    """
    if world.world_size == 1:
        return None
    if world.mpi is not None:
        return _over_mpi(world, world.mpi, environ, timeout_s, watchdog)
    watchdog.stage("for the ranks to find rank 0's address")
    return _without_mpi(world, environ, timeout_s)


def _over_mpi(world: World, comm: Comm, environ: Environ, timeout_s: float, watchdog: Watchdog) -> Endpoint:
    """Broadcasts rank 0's address, port and a new key; then every rank connects. Collective."""
    ports = [read_port(environ)] if "MASTER_PORT" in environ else [0]
    watchdog.stage("in MPI for rank 0's address")
    failure, key, host, port, why, listen = "", b"", "", 0, "", ""
    process: StoreProcess | None = None
    if world.rank == 0:
        try:
            address, num_clients = choose_address(world, environ), _num_connections(world)
            listener = open_listener(ports, address.listen, num_clients)
            host, why, listen, port = address.host, address.why, address.listen, listener.getsockname()[1]
            key = new_secret()
            process = StoreProcess(listener, key, RANK_0_GONE, num_clients)
        except RendezvousError as error:
            failure = str(error)
    failure, key, host, port, why = comm.bcast((failure, key, host, port, why))
    if failure:
        stop_together(world.rank, RendezvousError(failure))
    watchdog.stage(f"in MPI for every rank to reach {host}:{port}")
    problem, store = "", None
    limit_s = min(timeout_s, _CONNECT_S + world.world_size // _RANKS_PER_S)
    try:
        store = connect(host, [port], lambda: key, limit_s)
    except RendezvousError as error:
        problem = f"{_name(world)} cannot reach rank 0 at {host}:{port}: {error}"
    problem, num_affected = comm.combine(problem, _first_and_number)
    if problem or store is None:
        hint = "set DDP_HPC_FABRIC_INTERFACE or MASTER_ADDR for the network that connects the nodes"
        text = f"{problem} ({why}); {num_affected} of {world.world_size} ranks are affected; {hint}"
        stop_together(world.rank, RendezvousError(text))
    return Endpoint(
        host=host,
        why=why,
        interface=_interface_towards(world, environ, host, port),
        store=store,
        process=process,
        listen=listen,
    )


def _num_connections(world: World) -> int:
    """Returns the number of connections to the store: of all ranks, and of the servers of torch's clients."""
    return world.world_size + (world.num_nodes or -(-world.world_size // world.local_size))


def _first_and_number(problems: list[str]) -> tuple[str, int]:
    return first_text(problems), sum(map(bool, problems))


def _without_mpi(world: World, environ: Environ, timeout_s: float) -> Endpoint:
    """Connects the ranks with a host, ports and a key that every rank can determine. Collective."""
    point, listen = rendezvous_point(world, environ), ""
    process: StoreProcess | None = None
    key, note = shared_secret(environ, point.launch)
    if world.rank == 0:
        process, store = serve_store(point, key, world.hostname, _num_connections(world))
        host, why, listen = _host_of_store(point, environ)
        wait_for_ranks(store, list(range(1, world.world_size)), timeout_s, {"host": host, "why": why})
        if point.why == BY_HAND:
            store.when_set(_DUPLICATE, partial(_warn_of_duplicate, world))
    else:

        def read_key_again() -> bytes:
            return shared_secret(environ, point.launch)[0]

        joining = Joining(point, read_key_again, world.rank, _name(world))
        store = joining.connect(timeout_s)
        # Rank 0 counts from its own start and knows the missing ranks, so it must give up first.
        answer = joining.join(store, timeout_s + _LATER_S)
        host, why = answer["host"], answer["why"]
    return Endpoint(
        host=host,
        why=why,
        interface=_interface_towards(world, environ, host, store.port),
        store=store,
        process=process,
        listen=listen,
        note=note,
    )


def _warn_of_duplicate(world: World, answer: Answer) -> None:
    if not isinstance(answer, list):
        return  # the store has ended
    number, _, name = answer[0].decode("utf-8", "replace").partition(" ")
    text = (
        f"{world.prefix}warning: {name} tried to join as rank {number}, which had already joined: if two "
        f"launches use the same address, their ranks may be mixed. {_SEPARATE}"
    )
    if not log_message(text):
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - called in the thread of the connection


def _name(world: World) -> str:
    return f"node {world.hostname} (rank {world.rank})"


def serve_store(
    point: RendezvousPoint, key: bytes, hostname: str, num_clients: int = 0
) -> tuple[StoreProcess, StoreClient]:
    """Starts the store on rank 0; returns its process and rank 0's own connection to it.

    `num_clients` is the number of connections to expect.

    Raises:
        RendezvousError: rank 0 is not on the host of `point`, or no port is free, or too few files can
            be opened.
    """
    # With `srun --distribution=arbitrary`, rank 0 may not be on the first node of the node list.
    if not is_own_address(point.host) and point.host.partition(".")[0] != hostname:
        raise RendezvousError(
            f"the ranks try to connect to rank 0 at {point.host}, but rank 0 runs on {hostname}; export "
            f"MASTER_ADDR={hostname} before you start the ranks"
        )
    listener = open_listener(point.ports, point.listen, num_clients)
    port = listener.getsockname()[1]
    process = StoreProcess(listener, key, RANK_0_GONE, num_clients)
    return process, connect(point.listen or LOOPBACK, [port], lambda: key, _CONNECT_S)


def wait_for_ranks(store: StoreClient, numbers: list[int], timeout_s: float, answer: dict[str, str]) -> None:
    """Waits until all ranks with these numbers have joined, and sends them rank 0's answer.

    Raises:
        RendezvousError: some ranks did not join. The other ranks receive the reason and stop without a
        message.
    """
    try:
        store.take(_SHARED, len(numbers), timeout_s)
    except RendezvousError as error:
        if not isinstance(error, TimeoutError):
            raise
        text = _missing_text(store, numbers, timeout_s)
        store.set(f"{_SHARED}/result", f"error {text}".encode(), _ANSWER_S)
        raise RendezvousError(text) from None
    store.set(f"{_SHARED}/result", f"ok {json.dumps(answer)}".encode(), _ANSWER_S)


def join_store(
    point: RendezvousPoint,
    key: Callable[[], bytes],
    number: int,
    name: str,
    connect_s: float,
    result_s: float,
) -> tuple[StoreClient, dict[str, str]]:
    """Connects a rank other than 0 to the store; returns the connection and rank 0's answer.

    Raises:
        RendezvousError: the store was not found.
        ReportedElsewhereError: rank 0 has reported why the job cannot continue.
    """
    joining = Joining(point, key, number, name)
    store = joining.connect(connect_s)
    return store, joining.join(store, result_s)


@dataclass(frozen=True)
class Joining:
    """A rank other than 0 that joins without MPI."""

    point: RendezvousPoint
    key: Callable[[], bytes]
    number: int
    name: str

    def connect(self, timeout_s: float) -> StoreClient:
        """Returns a connection to a store in which no other rank has joined with this number.

        Under torchrun the store of an earlier attempt may still run for a moment. In that store, all ranks
        have already joined. The store of this attempt uses another port, or starts later.

        Raises:
            RendezvousError: there is no such store.
        """
        point, end_s = self.point, time.monotonic() + timeout_s
        ports = list(point.ports)
        while True:
            try:
                store = connect(point.host, ports, self.key, max(end_s - time.monotonic(), 0.1))
            except RendezvousError as error:
                address = local_address_towards(point.host, point.ports[0])
                interface = interface_of(address) if address else None
                raise RendezvousError(
                    f"{self.name} cannot reach rank 0 ({point.why}; local interface: {interface or 'none'})"
                ) from error
            if self.is_first(store, timeout_s):
                return store
            if time.monotonic() > end_s:
                self._report_duplicate(store)
                store.close()
                raise RendezvousError(
                    f"{self.name}: another process has already joined as rank {self.number} at "
                    f"{point.host}:{store.port}; check for processes of an earlier launch, or of another "
                    "launch with the same address, whose ranks may now be mixed with those of this one. "
                    f"{_SEPARATE}"
                )
            store.close()
            ports.sort(key=store.port.__eq__)  # move this port to the end
            time.sleep(_RETRY_S)

    def _report_duplicate(self, store: StoreClient) -> None:
        if self.point.why == BY_HAND:
            with suppress(ConnectionError, TimeoutError):
                store.set(_DUPLICATE, f"{self.number} {self.name}".encode(), _ANSWER_S)

    def is_first(self, store: StoreClient, timeout_s: float) -> bool:
        """Returns whether no other process has joined this store with this number, and registers this one."""
        with suppress(ConnectionError):
            return store.add(f"{_SHARED}/{self.number}/arrivals", 1, max(timeout_s, _ANSWER_S)) == 1
        return False

    def join(self, store: StoreClient, result_s: float) -> dict[str, str]:
        """Waits for all ranks and returns rank 0's answer.

        Raises:
            RendezvousError: rank 0 has ended.
            ReportedElsewhereError: rank 0 has reported why the job cannot continue.
        """
        try:
            store.give(_SHARED, self.number, short_hostname().encode(), result_s)
            result = store.get([f"{_SHARED}/result"], result_s)[0].decode("utf-8", "replace")
        except (ConnectionError, TimeoutError) as error:
            where = f"{self.point.host}:{store.port}"
            raise RendezvousError(
                f"{self.name}: rank 0 at {where} has ended, or is waiting for other ranks; check their errors"
            ) from error
        word, _, text = result.partition(" ")
        if word != "ok":
            raise ReportedElsewhereError(text)
        answer: dict[str, str] = json.loads(text)
        return answer


def _host_of_store(point: RendezvousPoint, environ: Environ) -> tuple[str, str, str]:
    """Returns rank 0's host, the reason, and where to listen; prefers the profile's network interface."""
    if "MASTER_ADDR" not in environ and point.host != LOOPBACK and (found := fabric_interface(environ)):
        return found[1], f"interface {found[0]} (DDP_HPC_FABRIC_INTERFACE)", found[1]
    return point.host, point.why, point.listen


def _interface_towards(world: World, environ: Environ, host: str, port: int) -> str | None:
    """Returns this host's network interface for the ranks: the profile's, or the one that leads to rank 0."""
    if not world.is_multi_node:
        return "lo"
    if found := fabric_interface(environ):
        return found[0]
    own = local_address_towards(host, port)
    if own is None or own.startswith("127."):
        # Rank 0's own name may resolve to loopback (Debian's 127.0.1.1), but its peers are on other nodes.
        return next(iter(outward_interfaces()), None)
    return interface_of(own)


def _missing_text(store: StoreClient, numbers: list[int], timeout_s: float) -> str:
    given = store.given(_SHARED, _ANSWER_S)
    missing = sorted(set(numbers) - set(given))
    ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    hosts = sorted({value.decode() for value in given.values()})
    joined = f"; ranks on {', '.join(hosts[:8])} did" if hosts else ""
    return (
        f"{len(missing)} of {len(numbers)} ranks did not connect to rank 0 ({short_hostname()}, "
        f"port {store.port}) within {timeout_s:g} s: rank {ranks}{joined}; check their errors above, or "
        "increase the time limit"
    )
