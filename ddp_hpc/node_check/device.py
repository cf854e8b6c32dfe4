"""What each rank checks with torch: its device, and one all-reduce over all ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.discovery.world import World
from ddp_hpc.doctor.check_result import first_line
from ddp_hpc.node_check.results import COLLECTIVE, Problem
from ddp_hpc.rendezvous.connect_ranks import Endpoint
from ddp_hpc.rendezvous.store_client import connect
from ddp_hpc.rendezvous.store_comm import StoreComm
from ddp_hpc.training.process_group.devices import choose_backend, device_kind, pick_device
from ddp_hpc.training.process_group.group_store import group_store

Tell = Callable[[str, str], None]
"""Called with the device and the stage of the check."""

_GIB = 1024**3
# A process needs less than this for its context on a GPU. The driver needs less, too.
_CONTEXT_BYTES = _GIB
# The ranks of the attempt before may just be ending.
_FREED_S = 5.0
_SIZE, _SIZE_ON_CPU = 4096, 256
_CONNECT_S = 20.0


def check_device(world: World, tell: Tell) -> tuple[int, list[Problem]]:
    """Returns the number of GPUs that this rank sees, and the problems of its own one."""
    tell(f"rank {world.rank}", "initializing the device")
    try:
        device, number = _device(world)
    except (DdpHpcError, RuntimeError) as error:
        return 0, [Problem("device", f"rank {world.rank} cannot use its device ({first_line(error)})")]
    name = _name(device, number, world)
    problems = []
    try:
        if number:
            tell(name, "checking its free memory")
            num_sharing = -(-world.local_size // number)
            module = torch.get_device_module(device.type)
            is_integrated = getattr(module.get_device_properties(device), "is_integrated", False)
            if hasattr(module, "mem_get_info") and not is_integrated:
                in_use = memory_in_use(lambda: module.mem_get_info(device), num_sharing)
                problems = [Problem("memory", f"{name} has {in_use}")] if in_use else []
        tell(name, "matrix product")
        if not product_is_right(device, _SIZE if number else _SIZE_ON_CPU):
            problems.append(Problem("product", f"{name} computed a wrong matrix product"))
    except RuntimeError as error:
        problems.append(Problem("device", f"{name} failed ({first_line(error)})"))
    return number, problems


def _device(world: World) -> tuple[torch.device, int]:
    device = pick_device(device_kind("auto"), world)
    number = 0 if device.type == "cpu" else torch.get_device_module(device.type).device_count()
    return device, number


def _name(device: torch.device, number: int, world: World) -> str:
    if device.type == "cpu":
        return "the CPU"
    return f"GPU {device.index if number > 1 else world.local_rank}"


def memory_in_use(ask: Callable[[], tuple[int, int]], num_sharing: int, limit_s: float = _FREED_S) -> str:
    """Returns how much memory other processes use on a device, if they do not free it within `limit_s`.

    `ask` returns the free and the total memory in bytes. `num_sharing` ranks use the device.
    """
    end_s = time.monotonic() + limit_s
    while True:
        free_bytes, total_bytes = ask()
        used_bytes = total_bytes - free_bytes
        if used_bytes <= (1 + num_sharing) * _CONTEXT_BYTES:
            return ""
        if time.monotonic() > end_s:
            return f"{used_bytes / _GIB:.1f} GiB of memory in use by other processes"
        time.sleep(0.5)


def product_is_right(device: torch.device, size: int) -> bool:
    """Returns whether the device computes one matrix product exactly.

    All values are small integers, whose products and sums are exact in float32 and with TF32.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-8, 9, (size, size), generator=generator).float() for _ in range(2))
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    product = (left.to(device) @ right.to(device)).cpu()
    # With a vector, the comparison needs no second product of matrices on the CPU.
    return torch.equal(product.double() @ signs, left.double() @ (right.double() @ signs))


def all_reduce(world: World, link: dict[str, Any], tell: Tell, limit_s: float) -> list[Problem]:
    """Adds one value of each rank, and returns what is wrong. Collective: every rank must call this.

    `link` has the address and the key of the ranks' store.
    """
    device, number = _device(world)
    tell(_name(device, number, world), COLLECTIVE)
    try:
        if link["interface"]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", link["interface"])
        key = bytes.fromhex(link["key"])
        client = connect(link["host"], [link["port"]], lambda: key, _CONNECT_S)
        endpoint = Endpoint(host=link["host"], why="", interface=None, store=client, listen=link["listen"])
        comm = StoreComm(client, world.rank, world.world_size, limit_s)
        backend = choose_backend("auto", device.type)
        store = group_store(endpoint, comm, world, backend, limit_s)
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=limit_s),
            device_id=device if number else None,
        )
        values = torch.full((1024,), world.rank + 1, dtype=torch.int64, device=device)
        dist.all_reduce(values)
        expected = world.world_size * (world.world_size + 1) // 2
        if bool((values == expected).all()):
            return []
        return [Problem(COLLECTIVE, "the all-reduce over all ranks returned a wrong result")]
    except (DdpHpcError, RuntimeError) as error:
        return [Problem(COLLECTIVE, f"the all-reduce over all ranks failed ({first_line(error)})")]
