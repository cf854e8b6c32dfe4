"""The process group: from a world and an endpoint to ranks that can train together, and back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_hpc.errors import DdpHpcError, ReportedElsewhereError, RequestError
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.devices import (
    choose_backend,
    device_identity,
    device_kind,
    pick_device,
    shared_devices,
)
from ddp_hpc.training.failure import FailureWatch
from ddp_hpc.training.store_comm import PrefixStore, Store, StoreComm, TCPStore
from ddp_hpc.world.comm import Comm, SingleComm
from ddp_hpc.world.placement import own_cores, threads_per_rank
from ddp_hpc.world.rendezvous import Endpoint
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
    watch: FailureWatch | None = None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum over ranks, in place. Collective: every rank must call this."""
        if self.backend != "none":
            dist.all_reduce(values)
        return values

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
        stop_together(world.rank, text + where, exit_code)


def same_everywhere(comm: Comm, value: str) -> str:
    """A problem's text where ranks have different values; empty where all agree. Collective."""
    values = comm.allgather(value)
    other = next((rank for rank, theirs in enumerate(values) if theirs != values[0]), None)
    return (
        ""
        if other is None
        else f"rank 0 would use {values[0]}, rank {other} {values[other]}: all have to agree"
    )


def stop_together(rank: int, message: str, exit_code: int) -> None:
    """Raises on every rank what all of them know, so that only rank 0 prints it."""
    if rank != 0:
        raise ReportedElsewhereError(message, exit_code)
    error = RequestError(message) if exit_code == RequestError.exit_code else DdpHpcError(message)
    error.everywhere = True
    raise error


def open_store(endpoint: Endpoint, timeout_s: float) -> Store:
    """The store at the endpoint. Rank 0's listening socket goes over to it, so its port is never free."""
    listener = endpoint.listener
    store = TCPStore(
        endpoint.host,
        endpoint.port,
        None,
        is_master=listener is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    if endpoint.agent_hosts_it:
        # torchrun's agent keeps one store over restarts: an old attempt's keys must not be read.
        return PrefixStore(f"ddp-hpc/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store


@contextmanager
def joined(world: World, endpoint: Endpoint | None, config: TrainConfig) -> Iterator[Group]:
    """The connected ranks; the process group is taken down after. Collective.

    Raises:
        RequestError: a device or backend is not to be had here, or two ranks would share a device.
    """
    if endpoint is None:
        yield _alone(world, config)
        return
    store = open_store(endpoint, config.init_timeout_s)
    watch = FailureWatch(store, world.rank)
    comm = StoreComm(PrefixStore("comm", store), world.rank, world.world_size, config.timeout_s)
    problem, device, backend = "", torch.device("cpu"), ""
    try:
        device = pick_device(device_kind(config.device), world)
        backend = choose_backend(config.backend, device.type)
    except RequestError as error:
        problem = str(error)
    agree(comm, world, problem, RequestError.exit_code)
    agree(comm, world, same_everywhere(comm, f"{backend} on {device.type}"), RequestError.exit_code)
    identities = comm.allgather([world.hostname, device_identity(device)])
    agree(comm, world, shared_devices(identities), RequestError.exit_code)
    cores = comm.allgather(own_cores())
    of_node = [cores[rank] for rank, (host, _) in enumerate(identities) if host == world.hostname]
    threads, why = _set_threads(config, of_node, world)
    if endpoint.interface and backend == "gloo":
        # gloo asks the host name for its own address otherwise, which Debian answers with 127.0.1.1.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", endpoint.interface)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=config.timeout_s),
        device_id=device if device.type != "cpu" else None,
    )
    num_nodes = len({host for host, _ in identities})
    placement = (
        f"{world.world_size} ranks on {num_nodes} node{'s' * (num_nodes > 1)} ({world.launcher}), "
        f"{backend} on {device.type}, {threads} thread{'s' * (threads > 1)} a rank ({why}), "
        f"store {endpoint.host}:{endpoint.port} ({endpoint.why})"
    )
    yield Group(
        world=world,
        comm=comm,
        device=device,
        backend=backend,
        threads=threads,
        placement=placement,
        watch=watch,
    )
    # Not in a `finally`: after a failure, taking the group down would wait for the rank that failed.
    comm.barrier("the end of training")
    dist.destroy_process_group()
    watch.close(world.world_size)


def _alone(world: World, config: TrainConfig) -> Group:
    device = pick_device(device_kind(config.device), world)
    choose_backend(config.backend, device.type)
    threads, why = _set_threads(config, [own_cores()], world)
    placement = f"1 rank ({world.launcher}) on {device}, {threads} thread{'s' * (threads > 1)} ({why})"
    return Group(
        world=world, comm=SingleComm(), device=device, backend="none", threads=threads, placement=placement
    )


def _set_threads(config: TrainConfig, of_node: list[list[int]], world: World) -> tuple[int, str]:
    threads, why = threads_per_rank(own_cores(), of_node, os.environ, world.launcher)
    if config.threads is not None:
        threads, why = config.threads, "--threads"
    torch.set_num_threads(threads)
    return threads, why
