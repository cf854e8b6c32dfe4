"""Creates and destroys the process group of the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_hpc.base.errors import DdpHpcError, RequestError, stop_together
from ddp_hpc.base.option_names import named
from ddp_hpc.base.units import counted
from ddp_hpc.discovery.cpu_affinity import own_cores, threads_per_rank
from ddp_hpc.discovery.rank_communication import Comm, GroupComm, SingleComm
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.store_client import StoreClient
from ddp_hpc.rendezvous.store_comm import StoreComm
from ddp_hpc.training.process_group.check_placement import check_placement
from ddp_hpc.training.process_group.config import ProcessGroupConfig
from ddp_hpc.training.process_group.devices import choose_backend, device_kind, group_backends, pick_device
from ddp_hpc.training.process_group.errors_of_torch import known_cause
from ddp_hpc.training.process_group.flight_recorder import turn_on_flight_recorder
from ddp_hpc.training.process_group.group_store import Store, group_store
from ddp_hpc.training.process_group.link import Link
from ddp_hpc.training.process_group.start_phases import CHOOSING, CONNECTING
from ddp_hpc.training.process_group.wait_for_gloo import wait_for_gloo

# torch 2.13 renamed this function, and prints a warning for the old name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True)
class Group:
    """The connected ranks. `backend` is `none` for a single rank."""

    world: World
    comm: GroupComm
    device: torch.device
    backend: str
    threads: int
    placement: str  # the numbers of nodes, devices and threads, for the log
    host: str = ""  # rank 0's address; empty for a single rank
    listen: str = ""  # the address on which rank 0 listens for the others; empty: all its addresses
    checked: tuple[str, ...] = ()  # lines about the checks of the placement; empty except on rank 0
    notes: tuple[str, ...] = ()  # notes about the connection, for the log
    store: StoreClient | None = None  # for messages between threads of the ranks; None for a single rank

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums the values element-wise over ranks, in place. Collective: every rank must call this."""
        if self.backend != "none":
            with contiguous(values) as sent:
                dist.all_reduce(sent)
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Returns every rank's values, which must have the same shape, as one tensor (world_size, ...).

        Collective: every rank must call this.
        """
        if self.backend == "none":
            return values.unsqueeze(0)
        gathered = values.new_empty((self.world.world_size, *values.shape))
        _all_gather(gathered.view(-1), values.contiguous().view(-1))  # gloo accepts no other shapes
        return gathered

    def agree(self, problem: str, kind: type[DdpHpcError] = RequestError) -> None:
        """Stops all ranks if any has a problem. Collective: every rank must call this."""
        agree(self.comm, self.world, problem, kind)

    def failing_together(self) -> AbstractContextManager[None]:
        """Stops all ranks if the `with` block raises RequestError on any. Collective, like `agree`."""
        return failing_together(self.comm, self.world)


@contextmanager
def contiguous(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Provides contiguous memory for a collective that changes `values` in place.

    Unlike gloo, NCCL accepts only contiguous tensors.
    """
    sent = values.contiguous()
    yield sent
    if sent is not values:
        values.copy_(sent)


@contextmanager
def failing_together(comm: Comm, world: World) -> Iterator[None]:
    """Stops all ranks if the `with` block raises RequestError on any. Collective, like `agree`."""
    problem = ""
    try:
        yield
    except RequestError as error:
        if known_cause(error):
            raise  # the others get the text only, and the request is not what is wrong
        problem = str(error)
    agree(comm, world, problem)


def agree(comm: Comm, world: World, problem: str, kind: type[DdpHpcError] = RequestError) -> None:
    """Stops all ranks if any has a problem. Collective: every rank must call this.

    Raises:
        DdpHpcError: on rank 0, with the first rank's problem; ReportedElsewhereError on the others.
    """
    if text := comm.combine(problem, _first_problem):
        stop_together(world.rank, kind(text))


def _first_problem(problems: list[str]) -> str:
    affected = [rank for rank, text in enumerate(problems) if text]
    if not affected:
        return ""
    first, number = affected[0], counted(len(affected), "rank")
    where = f" (rank {first}; {number} affected)" if len(affected) < len(problems) else ""
    return problems[first] + where


def mismatch_between_ranks(comm: Comm, value: str) -> str:
    """Returns the error message if ranks have different values; empty if all are equal. Collective."""
    return comm.combine(value, _first_mismatch)


def _first_mismatch(values: list[str]) -> str:
    for rank, theirs in enumerate(values):
        if theirs != values[0]:
            return (
                f"all ranks must use the same settings, but rank 0 uses {values[0]} and rank {rank} uses "
                f"{theirs}; check the options and the device of rank {rank}"
            )
    return ""


@contextmanager
def connected_group(
    world: World,
    link: Link | None,
    config: ProcessGroupConfig,
    report: Callable[[str], None],
    *,
    devices_per_rank: int = 1,
    cpu_offload: bool = False,
) -> Iterator[Group]:
    """Creates the process group for a `with` block, and destroys it afterwards. Collective.

    `report` is called with each phase, for the heartbeat.

    Raises:
        RequestError: a device or backend is not available, or two ranks would share a device.
    """
    report(CHOOSING)
    if link is None:
        yield _single_rank(world, config, devices_per_rank)
        return
    comm, endpoint = link.comm, link.endpoint
    device, backend = _choose_device(comm, world, config, devices_per_rank)
    cores = sum(1 << core for core in own_cores())
    node = comm.members(world.hostname, f"{cores:x}")
    of_node = [_core_list(int(mask, 16)) for mask in node.values]
    checked = check_placement(comm, world, device, backend)
    threads, why = _set_threads(config, of_node, world)
    backends = group_backends(backend, device.type, cpu_offload=cpu_offload)
    bound = _bound_device(device, backends, devices_per_rank)
    report(CONNECTING)
    store = _init_process_group(world, link, config, backend, backends, bound)
    placement = (
        f"{counted(world.world_size, 'rank')} on {counted(node.num_groups, 'node')} ({world.launcher}), "
        f"{backend} on {device.type}, {counted(threads, 'thread')} per rank ({why}), "
        f"rendezvous at {endpoint.host}:{endpoint.port} ({endpoint.why})"
    )
    comm.timeout_s = config.timeout_s
    yield Group(
        world=world,
        comm=comm,
        device=device,
        backend=backend,
        threads=threads,
        placement=placement,
        host=endpoint.host,
        listen=endpoint.listen,
        checked=checked,
        notes=(endpoint.note,) if endpoint.note else (),
        store=endpoint.store,
    )
    # This is not in a `finally`, because destroying the group would wait for a rank that has failed.
    _destroy_process_group(link)
    del store  # C++ does not keep it alive


def _choose_device(
    comm: StoreComm, world: World, config: ProcessGroupConfig, devices_per_rank: int
) -> tuple[torch.device, str]:
    """Returns this rank's device and the backend. Collective: every rank must call this."""
    with failing_together(comm, world):
        device = pick_device(device_kind(config.device), world, devices_per_rank)
        backend = choose_backend(config.backend, device.type)
    agree(comm, world, mismatch_between_ranks(comm, f"{backend} on {device.type}"))
    return device, backend


def _bound_device(device: torch.device, backends: str, devices_per_rank: int) -> torch.device | None:
    """Returns the `device_id` of the process group: the device of this rank, or None.

    It is None if the rank has several devices or if the backends include gloo. NCCL and XCCL connect a bound
    device at once, but then raise DistBackendError for a tensor on another device (ProcessGroupNCCL.cpp of
    torch 2.8 to 2.13, initNCCLComm), such as a gradient on the rank's second device. With a bound device,
    torch creates the groups of a mesh by splitting, and torch 2.8 cannot split a group with gloo (split_group
    in torch/distributed/distributed_c10d.py).
    """
    return device if backends in ("nccl", "xccl") and devices_per_rank == 1 else None


def _init_process_group(
    world: World,
    link: Link,
    config: ProcessGroupConfig,
    backend: str,
    backends: str,
    device: torch.device | None,
) -> Store:
    """Creates torch's process group; returns its store. Collective: every rank must call this."""
    if link.endpoint.interface and "gloo" in backends:
        # Otherwise gloo resolves the host name to find its own address; on Debian that is 127.0.1.1.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", link.endpoint.interface)
    turn_on_flight_recorder(os.environ)
    store = group_store(link.endpoint, link.comm, world, backend, config.init_timeout_s)
    dist.init_process_group(
        backends,
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=config.timeout_s),
        device_id=device,
    )
    return store


def _destroy_process_group(link: Link) -> None:
    """Destroys the process group and closes the link. Collective: every rank must call this."""
    link.comm.barrier("the end of training")
    wait_for_gloo()  # otherwise, freeing the group could deadlock with a thread of gloo
    dist.destroy_process_group()
    # Some ranks may take longer to destroy NCCL, for which they need the store on rank 0: wait for them.
    link.comm.barrier("the end of the process group")
    link.watch.close()
    link.endpoint.close()


def _core_list(mask: int) -> list[int]:
    return [core for core in range(mask.bit_length()) if mask >> core & 1]


def _single_rank(world: World, config: ProcessGroupConfig, devices_per_rank: int) -> Group:
    device = pick_device(device_kind(config.device), world, devices_per_rank)
    choose_backend(config.backend, device.type)
    threads, why = _set_threads(config, [own_cores()], world)
    placement = f"1 rank ({world.launcher}) on {device}, {counted(threads, 'thread')} ({why})"
    return Group(
        world=world,
        comm=SingleComm(),
        device=device,
        backend="none",
        threads=threads,
        placement=placement,
        checked=check_placement(None, world, device, "none"),
    )


def _set_threads(config: ProcessGroupConfig, of_node: list[list[int]], world: World) -> tuple[int, str]:
    threads, why = threads_per_rank(own_cores(), of_node, os.environ, world.launcher)
    if config.threads is not None:
        threads, why = config.threads, named("threads")
    torch.set_num_threads(threads)
    return threads, why
