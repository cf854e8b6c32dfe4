"""A rendezvous backend for torchrun's agents that uses an authenticated store instead of torch's TCPStore.

torch's c10d rendezvous keeps its state as a pickle in an unauthenticated store: anyone on the network could
write a pickle, and every agent would then unpickle it with its own privileges (verified with torch 2.13).
This backend runs the same code with a store that requires the job's key.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ddp_hpc.base.errors import RendezvousError, RequestError
from ddp_hpc.discovery.network_interfaces import is_own_address
from ddp_hpc.rendezvous.launch_secret import KEY_FILE, read_secret
from ddp_hpc.rendezvous.listener import open_listener
from ddp_hpc.rendezvous.store_client import connect
from ddp_hpc.rendezvous.store_process import StoreProcess
from ddp_hpc.training.process_group.group_store import GroupStore

BACKEND = "ddp-hpc"
"""The name for torchrun's --rdzv-backend."""
_READ_TIMEOUT_S = 60  # the default of torch's c10d rendezvous
# The stores that this process hosts. The references keep the stores alive until the process exits.
_servers: list[StoreProcess] = []


class _Backend(C10dRendezvousBackend):
    """The c10d backend with the name that the user requested, because torchrun compares the names."""

    @property
    def name(self) -> str:
        return BACKEND


def register() -> None:
    """Registers the backend with torchrun, even if this package is only on the path and not installed."""
    rendezvous_handler_registry.register(BACKEND, create)


def handler() -> object:
    """Returns the function that creates the handler. Called by torchrun's entry point `torchrun.handlers`."""
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Creates a handler for a rendezvous at --rdzv-endpoint; DDP_HPC_KEY_FILE is the file with the key.

    If the endpoint is on this host and nobody listens there, this process hosts the store.

    Raises:
        RequestError: DDP_HPC_KEY_FILE is not set.
        RendezvousError: no store with the key answers at the endpoint within `join_timeout`.
    """
    path = os.environ.get(KEY_FILE)
    if not path:
        raise RequestError(
            f"--rdzv-backend {BACKEND} requires that {KEY_FILE} is set to the path of a file with the job's "
            "key. Start torchrun with torchrun_script.sh, which creates this file, or create it where all "
            "nodes can read it: "
            "(umask 077; openssl rand -hex 32 >FILE)"
        )
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=-1)
    join_s = float(params.get_as_int("join_timeout", 600) or 600)
    if is_own_address(host):
        # The port is in use if torchrun_script.sh or another agent on this host already hosts the store.
        with suppress(RendezvousError):
            _servers.append(StoreProcess(open_listener([port]), read_secret(Path(path))))
    client = connect(host, [port], lambda: read_secret(Path(path)), join_s)
    timeout_s = float(params.get_as_int("read_timeout", _READ_TIMEOUT_S) or _READ_TIMEOUT_S)
    store = GroupStore(client, "agents/", timeout_s)
    return create_handler(store, _Backend(store, params.run_id), params)
