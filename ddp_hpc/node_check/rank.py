"""One rank of the check of nodes. It does not import torch, so that it answers even if its worker hangs."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from ddp_hpc.base.errors import DdpHpcError, RendezvousError, RequestError
from ddp_hpc.discovery.node_check_request import NODE_CHECK
from ddp_hpc.discovery.print_once_per_node import print_once_per_node
from ddp_hpc.discovery.world import World, discover, short_hostname
from ddp_hpc.node_check.collect import (
    ANSWER_S,
    DEVICE,
    END,
    GO,
    JOINED,
    LATER,
    collective_s,
    coordinate,
    stage_key,
)
from ddp_hpc.node_check.node import node_problems
from ddp_hpc.node_check.results import Problem, write_results
from ddp_hpc.node_check.worker import Worker
from ddp_hpc.rendezvous.address import rendezvous_point
from ddp_hpc.rendezvous.connect_ranks import Joining, interface_towards, serve_store
from ddp_hpc.rendezvous.launch_secret import shared_secret
from ddp_hpc.rendezvous.store_client import StoreClient

_CONNECT_S = 60.0
# Longer than rank 0 waits for all ranks.
_WAIT_S = 300.0


def main() -> NoReturn:
    """Runs the check, and exits with 0 unless the check itself is not possible."""
    code = 0
    try:
        _check(os.environ)
    except DdpHpcError as error:
        print_once_per_node(f"[{short_hostname()}] the nodes cannot be checked: {error}", os.environ)
        code = error.exit_code
    sys.stderr.flush()
    os._exit(code)  # a thread can hang


def _check(environ: Mapping[str, str]) -> None:
    world = discover(environ, "auto", lambda *_: None)
    if world.world_size == 1:
        raise RequestError("the launcher has started only one rank; use a launch line that starts several")
    store: StoreClient | None = None

    def on_stage(where: str, stage: str) -> None:
        if store is not None:
            with suppress(RendezvousError):
                store.set(stage_key(world.rank), json.dumps([where, stage]).encode(), ANSWER_S)

    worker = Worker(world, on_stage)  # imports torch meanwhile
    try:
        point = rendezvous_point(world, environ)
        key, process = shared_secret(environ, point.launch)[0], None
        if world.rank == 0:
            process, store = serve_store(point, key, world.hostname, 2 * world.world_size)
        else:
            name = f"node {world.hostname} (rank {world.rank})"
            joining = Joining(point, lambda: shared_secret(environ, point.launch)[0], world.rank, name)
            store = joining.connect(_CONNECT_S)
            key = shared_secret(environ, point.launch)[0]
        link = {
            "host": point.host,
            "port": store.port,
            "key": key.hex(),
            "listen": point.listen,
            "interface": interface_towards(world, environ, point.host, store.port),
        }
        threading.Thread(target=_take_part, args=(world, store, worker, link, environ), daemon=True).start()
        if process is None:
            with suppress(RendezvousError):  # rank 0 has ended
                store.wait([END], _WAIT_S)
            return
        results = coordinate(store, world.world_size)
        write_results(Path(environ[NODE_CHECK]), results)
        store.set(END, b"", ANSWER_S)
        with suppress(RendezvousError):
            store.goodbye(ANSWER_S)
        store.close()
        process.close()
    finally:
        worker.kill()


def _take_part(
    world: World, store: StoreClient, worker: Worker, link: dict[str, Any], environ: Mapping[str, str]
) -> None:
    """Gives rank 0 the results of this rank."""
    of_node: list[Problem] = []

    def check_node() -> None:
        of_node.extend(node_problems(Path(environ[NODE_CHECK]), environ))

    def give(key: str, **fields: Any) -> None:
        store.give(key, world.rank, json.dumps(fields).encode(), ANSWER_S)

    with suppress(RendezvousError):  # rank 0 has ended
        give(JOINED, host=world.hostname, local_size=world.local_size)
        node = threading.Thread(target=check_node, daemon=True)
        if world.local_rank == 0:
            node.start()
        own = worker.answer()
        if world.local_rank == 0:
            stage = json.dumps(["the node", "run directory, nvidia-smi and dcgmi"]).encode()
            store.set(stage_key(world.rank), stage, ANSWER_S)
            node.join()
        problems = [*own.problems, *of_node]
        give(DEVICE, num_devices=own.num_devices, problems=[vars(each) for each in problems])
        go = json.loads(store.get([GO], _WAIT_S)[0])
        received_s = clock_s()
        problems = []
        if go["all_reduce"]:
            worker.request_all_reduce(link, collective_s(world.world_size))
            problems = [*worker.answer().problems]
        give(LATER, received_s=received_s, sent_s=clock_s(), problems=[vars(each) for each in problems])


def clock_s() -> float:
    """Returns the clock of this node: seconds since the Unix epoch."""
    return time.time()
