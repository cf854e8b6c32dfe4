"""The process group: from a world and an endpoint to ranks that can train together, and back."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_hpc.errors import RendezvousError, RequestError, failure_of, stop_together
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.devices import choose_backend, device_kind, pick_device
from ddp_hpc.training.failure import FailureWatch
from ddp_hpc.training.flight_recorder import turn_on_flight_recorder
from ddp_hpc.training.placement import check_placement
from ddp_hpc.training.store_comm import PrefixStore, Store, StoreComm, TCPStore
from ddp_hpc.world.comm import Comm, SingleComm
from ddp_hpc.world.meeting import Door, open_listener
from ddp_hpc.world.once import say_once_a_node
from ddp_hpc.world.placement import own_cores, threads_per_rank
from ddp_hpc.world.rendezvous import Endpoint, MeetingPoint, knock_and_wait, wait_for_all
from ddp_hpc.world.topology import World


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks, connected. `backend` is `none` in a world of one."""

    world: World
    comm: Comm
    device: torch.device
    backend: str
    threads: int
    placement: str  # how many nodes, devices and threads, for people
    host: str = ""  # rank 0's address; empty in a world of one
    checked: tuple[str, ...] = ()  # on rank 0: lines on where the ranks run

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum over ranks, in place. Collective: every rank must call this."""
        if self.backend != "none":
            dist.all_reduce(values)
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's values, which are alike in shape: (world_size, ...).

        Collective: every rank must call this.
        """
        if self.backend == "none":
            return values.unsqueeze(0)
        found = values.new_empty((self.world.world_size, *values.shape))
        dist.all_gather(list(found), values.contiguous())
        return found

    def agree(self, problem: str, exit_code: int) -> None:
        """Stops all ranks if any has a problem. Collective: every rank must call this."""
        agree(self.comm, self.world, problem, exit_code)


def agree(comm: Comm, world: World, problem: str, exit_code: int) -> None:
    """Stops all ranks if any has a problem. Collective: every rank must call this.

    Raises:
        DdpHpcError: on rank 0, with the first rank's problem; ReportedElsewhereError on the others.
    """
    found = [(rank, text) for rank, text in enumerate(comm.allgather(problem)) if text]
    if found:
        rank, text = found[0]
        where = "" if len(found) == world.world_size else f" (rank {rank}; {len(found)} rank(s) in all)"
        stop_together(world.rank, failure_of(text + where, exit_code))


def same_everywhere(comm: Comm, value: str) -> str:
    """A problem's text where ranks have different values; empty where all agree. Collective."""
    values = comm.allgather(value)
    other = next((rank for rank, theirs in enumerate(values) if theirs != values[0]), None)
    return (
        ""
        if other is None
        else f"rank 0 would use {values[0]}, rank {other} {values[other]}: all have to agree"
    )


@dataclass(frozen=True)
class Link:
    """The ranks' store and what runs over it, before there is a process group."""

    endpoint: Endpoint
    store: Store
    comm: StoreComm
    watch: FailureWatch


def connect(world: World, endpoint: Endpoint, config: TrainConfig) -> Link:
    """The store at the endpoint, and the failure watch on it. Collective: every rank must call this."""
    timeout_s = config.init_timeout_s
    if endpoint.agent_hosts_it:
        endpoint = _own_endpoint(world, endpoint, timeout_s)
    store = _open_store(endpoint, timeout_s)
    gone = (
        f"[{world.hostname}] error: rank 0 is gone, and with it the ranks' common store: look for its error"
    )
    watch = FailureWatch(store, world.rank, world.world_size, lambda: say_once_a_node(gone, os.environ))
    comm = StoreComm(PrefixStore("comm", store), world.rank, world.world_size, timeout_s)
    return Link(endpoint, store, comm, watch)


def _open_store(endpoint: Endpoint, timeout_s: float) -> Store:
    """A store on rank 0's listening socket, which goes over to it: its port is never free in between."""
    listener = endpoint.listener
    return TCPStore(
        endpoint.host,
        endpoint.port,
        None,
        is_master=listener is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )


def _own_endpoint(world: World, agent: Endpoint, timeout_s: float) -> Endpoint:
    """An endpoint of this attempt's own, agreed on through the store of torchrun's agent.

    That store outlives restarts, and gloo would read the addresses of ranks that are
    gone; its restart count is no help, as nodes do not agree on it. So rank 0
    writes where its own door is, and the others read until a door there answers to
    the key that was written beside it.
    """
    key = f"ddp-hpc/endpoint/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    store = _open_store(agent, timeout_s)
    if world.rank == 0:
        listener = open_listener([0], loopback_only=False)
        port, nonce = listener.getsockname()[1], secrets.token_hex(8)
        store.set(key, f"{port} {nonce}")
        wait_for_all(Door(listener, nonce, {}), set(range(1, world.world_size)), timeout_s, agent.host)
        return replace(agent, port=port, listener=listener, agent_hosts_it=False)
    end_s = time.monotonic() + timeout_s
    while True:
        store.wait([key], timedelta(seconds=max(1.0, end_s - time.monotonic())))
        port_text, nonce = store.get(key).decode().split()
        point = MeetingPoint(agent.host, [int(port_text)], nonce, agent.why)
        try:
            knock_and_wait(point, f"node {world.hostname}", world.rank, min(2.0, timeout_s), timeout_s)
            return replace(agent, port=int(port_text), agent_hosts_it=False)
        except RendezvousError:
            # The door of an earlier attempt; rank 0 of this one has not written yet.
            if time.monotonic() > end_s:
                raise


@contextmanager
def joined(world: World, link: Link | None, config: TrainConfig) -> Iterator[Group]:
    """The connected ranks; the process group is taken down after. Collective.

    Raises:
        RequestError: a device or backend is not to be had here, or two ranks would share a device.
    """
    if link is None:
        yield _alone(world, config)
        return
    comm, endpoint = link.comm, link.endpoint
    problem, device, backend = "", torch.device("cpu"), ""
    try:
        device = pick_device(device_kind(config.device), world, config.devices_per_rank)
        backend = choose_backend(config.backend, device.type)
    except RequestError as error:
        problem = str(error)
    agree(comm, world, problem, RequestError.exit_code)
    agree(comm, world, same_everywhere(comm, f"{backend} on {device.type}"), RequestError.exit_code)
    cores = sum(1 << core for core in own_cores())
    cards = comm.allgather([world.hostname, f"{cores:x}"])
    of_node = [_core_list(int(mask, 16)) for host, mask in cards if host == world.hostname]
    checked = check_placement(comm, world, device, backend)
    threads, why = _set_threads(config, of_node, world)
    if endpoint.interface and backend == "gloo":
        # gloo asks the host name for its own address otherwise, which Debian answers with 127.0.1.1.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", endpoint.interface)
    turn_on_flight_recorder(os.environ)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", link.store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=config.timeout_s),
        device_id=device if device.type != "cpu" else None,
    )
    num_nodes = len({host for host, _ in cards})
    placement = (
        f"{world.world_size} ranks on {num_nodes} node{'s' * (num_nodes > 1)} ({world.launcher}), "
        f"{backend} on {device.type}, {threads} thread{'s' * (threads > 1)} a rank ({why}), "
        f"store {endpoint.host}:{endpoint.port} ({endpoint.why})"
    )
    group = Group(
        world=world,
        comm=comm,
        device=device,
        backend=backend,
        threads=threads,
        placement=placement,
        host=endpoint.host,
        checked=checked,
    )
    comm.timeout_s = config.timeout_s
    yield group
    # Not in a `finally`: after a failure, taking the group down would wait for the rank that failed.
    comm.barrier("the end of training")
    dist.destroy_process_group()
    # Taking NCCL down may take one rank longer than another, and rank 0 keeps the store.
    comm.barrier("the end of the process group")
    link.watch.close()


def _core_list(mask: int) -> list[int]:
    return [core for core in range(mask.bit_length()) if mask >> core & 1]


def _alone(world: World, config: TrainConfig) -> Group:
    device = pick_device(device_kind(config.device), world, config.devices_per_rank)
    choose_backend(config.backend, device.type)
    threads, why = _set_threads(config, [own_cores()], world)
    placement = f"1 rank ({world.launcher}) on {device}, {threads} thread{'s' * (threads > 1)} ({why})"
    return Group(
        world=world,
        comm=SingleComm(),
        device=device,
        backend="none",
        threads=threads,
        placement=placement,
        checked=check_placement(None, world, device, "none"),
    )


def _set_threads(config: TrainConfig, of_node: list[list[int]], world: World) -> tuple[int, str]:
    threads, why = threads_per_rank(own_cores(), of_node, os.environ, world.launcher)
    if config.threads is not None:
        threads, why = config.threads, "--threads"
    torch.set_num_threads(threads)
    return threads, why
