"""Connects the ranks of a node to the store through one process of the node, the relay.

The first rank of a node that connects starts the relay (`relay_server`); all others find it by the name of
its abstract Unix socket (unix(7)), which is derived from the job's key. Such a socket needs no directory, and
disappears with its process. A rank that cannot use the relay connects to rank 0 itself.
"""

from __future__ import annotations

import errno
import hmac
import socket
import time
from collections.abc import Callable

from ddp_hpc.base.errors import RendezvousError, RequestError
from ddp_hpc.discovery.launcher_environment import Environ
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.store_client import Relay, StoreClient, connect_to_relay
from ddp_hpc.rendezvous.store_process import RelayProcess
from ddp_hpc.rendezvous.store_protocol import ProtocolError

RELAY = "DDP_HPC_RELAY"
MIN_RANKS = 512
"""The smallest number of ranks with which relays are used, unless the user has set `DDP_HPC_RELAY`."""
_START_S = 10.0  # the time that is reserved for connecting without the relay
_BACKLOG = 1024


def uses_relay(world: World, environ: Environ) -> bool:
    """Returns whether the ranks of a node share their connections to rank 0.

    Raises:
        RequestError: `DDP_HPC_RELAY` has an unknown value.
    """
    choice = environ.get(RELAY, "")
    if choice not in ("", "0", "1"):
        raise RequestError(f"{RELAY}={choice[:80]!r} is not valid; use 1 or 0, or unset it")
    if world.local_size == 1:
        return False
    return choice == "1" if choice else world.world_size >= MIN_RANKS


def num_connections(world: World, environ: Environ) -> int:
    """Returns the number of connections to expect at rank 0."""
    if not uses_relay(world, environ):
        return world.world_size
    # While a node connects, its first rank has a connection, too.
    return 2 * (world.num_nodes or -(-world.world_size // world.local_size)) + world.local_size


def connect_through_relay(
    key: bytes, node: str, connect_directly: Callable[[float], StoreClient], limit_s: float
) -> tuple[StoreClient, RelayProcess | None]:
    """Returns a connection to the store through the relay of this node, or else without it.

    Returns the relay's process, too, if this rank has started it. `connect_directly` connects to the store
    within a number of seconds. `node` is the name of this node.

    Raises:
        RendezvousError: from `connect_directly`.
    """
    relay, end_s = Relay(_name(key, node), key), time.monotonic() + limit_s
    while (left_s := end_s - time.monotonic()) > _START_S:
        try:
            if (listener := _listen(relay.address)) is not None:
                return _start(relay, listener, connect_directly, left_s)
            # The relay answers once the rank that starts it has found the store.
            return connect_to_relay(relay, left_s - _START_S), None
        except ConnectionError:
            # The rank that started the relay has failed: take its place.
            time.sleep(0.1)
        except (OSError, ProtocolError):
            break
    return connect_directly(max(end_s - time.monotonic(), min(limit_s, _START_S))), None


def _name(key: bytes, node: str) -> str:
    return f"\0ddp-hpc-{hmac.digest(key, f'relay of {node}'.encode(), 'sha256')[:16].hex()}"


def _listen(address: str) -> socket.socket | None:
    """Returns a socket that listens at this address; None if another process does.

    Raises:
        OSError: the system does not permit it.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


def _start(
    relay: Relay, listener: socket.socket, connect_directly: Callable[[float], StoreClient], limit_s: float
) -> tuple[StoreClient, RelayProcess | None]:
    with listener:
        store = connect_directly(limit_s)
        try:
            process = RelayProcess(listener, relay.key, store.host, store.port)
        except RendezvousError:
            return store, None
    try:
        shared = connect_to_relay(relay, max(limit_s / 2, _START_S))
    except (OSError, ProtocolError):
        process.close()
        return store, None
    store.close()
    return shared, process
