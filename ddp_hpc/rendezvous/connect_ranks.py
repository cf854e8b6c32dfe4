"""The rendezvous: rank 0 starts a key-value store, and all ranks connect to it with the job's key.

The rendezvous needs neither a fixed port nor the output of `hostname`. Before torch is imported, each rank
has a connection to the store, and both sides have proved that they belong to this job.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ddp_hpc.base.errors import RendezvousError, ReportedElsewhereError, stop_together
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
    LOOPBACK,
    Address,
    RendezvousPoint,
    address_on_fabric,
    choose_address,
    read_port,
    rendezvous_point,
)
from ddp_hpc.rendezvous.launch_secret import new_secret, shared_secret
from ddp_hpc.rendezvous.listener import open_listener
from ddp_hpc.rendezvous.store_client import StoreClient, connect
from ddp_hpc.rendezvous.store_process import StoreProcess

_CONNECT_S = 20.0  # rank 0 already listens when the others start, so a longer wait would not help
_RANKS_PER_S = 100  # a cautious estimate of how many ranks rank 0 can accept per second
_LATER_S = 10.0  # the other ranks wait longer, so that rank 0, which knows the missing ranks, reports first
_ANSWER_S = 20.0
_RETRY_S = 0.2
_SHARED = "rendezvous"
_NOWHERE = Address("", "")


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
    process = StoreProcess(listener, key)
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


@dataclass(frozen=True)
class _Offer:
    """Where rank 0's store listens, and the key of the store; or the reason why the store was not started."""

    address: Address = _NOWHERE
    port: int = 0
    key: bytes = b""
    failure: str = ""


def _over_mpi(world: World, comm: Comm, environ: Environ, timeout_s: float, watchdog: Watchdog) -> Endpoint:
    """Broadcasts rank 0's address, port and a new key; then every rank connects. Collective."""
    ports = [read_port(environ)] if "MASTER_PORT" in environ else [0]
    watchdog.stage("in MPI for rank 0's address")
    offer, process = _serve_over_mpi(world, environ, ports) if world.rank == 0 else (_Offer(), None)
    offer = comm.bcast(offer)
    if offer.failure:
        stop_together(world.rank, RendezvousError(offer.failure))
    host, port = offer.address.host, offer.port
    watchdog.stage(f"in MPI for every rank to reach {host}:{port}")
    problem, store = "", None
    limit_s = min(timeout_s, _CONNECT_S + world.world_size // _RANKS_PER_S)
    try:
        store = connect(host, [port], lambda: offer.key, limit_s)
    except RendezvousError as error:
        problem = f"{_name(world)} cannot reach rank 0 at {host}:{port}: {error}"
    problem, num_affected = comm.combine(problem, _first_and_number)
    if problem or store is None:
        hint = "set DDP_HPC_FABRIC_INTERFACE or MASTER_ADDR for the network that connects the nodes"
        affected = f"{num_affected} of {world.world_size} ranks are affected"
        stop_together(world.rank, RendezvousError(f"{problem} ({offer.address.why}); {affected}; {hint}"))
    return _endpoint(world, environ, offer.address, store, process)


def _serve_over_mpi(
    world: World, environ: Environ, ports: Sequence[int]
) -> tuple[_Offer, StoreProcess | None]:
    """Starts the store on rank 0."""
    try:
        address = choose_address(world, environ)
        listener = open_listener(ports, address.listen, world.world_size)
        port, key = listener.getsockname()[1], new_secret()
        return _Offer(address, port, key), StoreProcess(listener, key, world.world_size)
    except RendezvousError as error:
        return _Offer(failure=str(error)), None


def _endpoint(
    world: World,
    environ: Environ,
    address: Address,
    store: StoreClient,
    process: StoreProcess | None,
    note: str = "",
) -> Endpoint:
    return Endpoint(
        host=address.host,
        why=address.why,
        interface=interface_towards(world, environ, address.host, store.port),
        store=store,
        process=process,
        listen=address.listen,
        note=note,
    )


def _first_and_number(problems: list[str]) -> tuple[str, int]:
    return first_text(problems), sum(map(bool, problems))


def _without_mpi(world: World, environ: Environ, timeout_s: float) -> Endpoint:
    """Connects the ranks with a host, ports and a key that every rank can determine. Collective."""
    point = rendezvous_point(world, environ)
    process: StoreProcess | None = None
    key, note = shared_secret(environ, point.launch)
    if world.rank == 0:
        process, store = serve_store(point, key, world.hostname, world.world_size)
        address = _address_of_store(point, environ)
        answer = {"host": address.host, "why": address.why}
        wait_for_ranks(store, list(range(1, world.world_size)), timeout_s, answer)
    else:

        def read_key_again() -> bytes:
            return shared_secret(environ, point.launch)[0]

        joining = Joining(point, read_key_again, world.rank, _name(world))
        store = joining.connect(timeout_s)
        # Rank 0 counts from its own start and knows the missing ranks, so it must give up first.
        address = Address(**joining.join(store, timeout_s + _LATER_S))
    return _endpoint(world, environ, address, store, process, note)


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
    process = StoreProcess(listener, key, num_clients)
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
                store.close()
                raise RendezvousError(
                    f"{self.name}: another process has already joined as rank {self.number} at "
                    f"{point.host}:{store.port}; check for processes of an earlier launch, or of another "
                    "launch with the same address, whose ranks may now be mixed with those of this one. Use "
                    "another MASTER_PORT for each launch, or export a different DDP_HPC_LAUNCH in each"
                )
            store.close()
            ports.sort(key=store.port.__eq__)  # move this port to the end
            time.sleep(_RETRY_S)

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


def _address_of_store(point: RendezvousPoint, environ: Environ) -> Address:
    """Returns rank 0's address for the other ranks; prefers the profile's network interface."""
    if "MASTER_ADDR" not in environ and point.host != LOOPBACK and (fabric := fabric_interface(environ)):
        return address_on_fabric(fabric)
    return Address(point.host, point.why, point.listen)


def interface_towards(world: World, environ: Environ, host: str, port: int) -> str | None:
    """Returns this host's network interface for the ranks: the profile's, or the one that leads to rank 0."""
    if not world.is_multi_node:
        return "lo"
    if fabric := fabric_interface(environ):
        return fabric.name
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
