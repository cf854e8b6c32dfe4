"""Selects the device and the backend of a rank."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.option_names import named
from ddp_hpc.discovery.print_once_per_node import print_once_per_node
from ddp_hpc.discovery.rank_placement import Device
from ddp_hpc.discovery.visible_gpus import correct_visible_gpus
from ddp_hpc.discovery.world import World, short_hostname

_BACKEND_OF = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}


def device_kind(wanted: str) -> str:
    """Returns `cuda`, `xpu` or `cpu`: the requested kind of device, or the best available one.

    Raises:
        RequestError: the requested device is not available.
        LaunchError: CUDA_VISIBLE_DEVICES has GPUs of another node.
    """
    if corrected := correct_visible_gpus(os.environ):
        print_once_per_node(f"[{short_hostname()}] warning: {corrected}", os.environ)
    is_available = {"cuda": torch.cuda.is_available(), "xpu": torch.xpu.is_available(), "cpu": True}
    if wanted == "auto":
        return next(kind for kind in is_available if is_available[kind])
    if not is_available[wanted]:
        raise RequestError(
            f"{named('device')} {wanted}: torch {torch.__version__} finds no {wanted} device on this node"
            f"{_why_no_cuda() if wanted == 'cuda' else ''}; use {named('device')} auto, or start the job "
            "on a GPU node"
        )
    return wanted


def _why_no_cuda() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return " (this torch was built without CUDA)"
    return ""


def choose_backend(wanted: str, kind: str) -> str:
    """Returns the process group's backend for a kind of device.

    Raises:
        RequestError: torch was built without the backend, or the backend does not support the device.
    """
    backend = _BACKEND_OF[kind] if wanted == "auto" else wanted
    if backend == "nccl" and kind != "cuda":
        raise RequestError(
            f"{named('backend')} nccl needs CUDA devices, but this node has none; "
            f"use {named('backend')} auto, "
            "which uses gloo on CPUs"
        )
    has = {
        "nccl": dist.is_nccl_available,
        "gloo": dist.is_gloo_available,
        "mpi": dist.is_mpi_available,
        "xccl": dist.is_xccl_available,
    }
    if not has[backend]():
        raise RequestError(
            f"{named('backend')} {backend}: torch {torch.__version__} was built without it; "
            f"use {named('backend')} auto"
        )
    return backend


def group_backends(backend: str, kind: str, *, cpu_offload: bool) -> str:
    """Returns the backends of torch's process group, one per kind of device, such as `cpu:gloo,cuda:nccl`.

    With `cpu_offload`, ranks also exchange tensors in host memory, for norms and snapshots.
    """
    return f"cpu:gloo,{kind}:{backend}" if cpu_offload and kind != "cpu" else backend


def pick_device(kind: str, world: World, per_rank: int = 1) -> torch.device:
    """Returns this rank's device, or the first of its `per_rank` consecutive devices.

    It is selected by the local rank, modulo the number of visible devices: the scheduler may show each
    rank only some of them, such as one with Slurm's --gpus-per-task.

    Raises:
        RequestError: fewer devices are visible than a rank needs.
    """
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    if (count := module.device_count()) < per_rank:
        raise RequestError(
            f"--devices-per-rank {per_rank}: rank {world.rank} on {world.hostname} sees only {count}; "
            "request more devices per rank from the scheduler, or use a smaller number"
        )
    device = torch.device(kind, world.local_rank % (count // per_rank) * per_rank)
    module.set_device(device)
    return device


def device_place(device: torch.device) -> Device:
    """Returns the UUID and PCI address of a physical device, if torch reports them."""
    if device.type == "cpu":
        return Device()
    properties = torch.get_device_module(device.type).get_device_properties(device)
    pci = ""
    if all(hasattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device")):
        # Written like the names of directories in sysfs; the PCI function, the last digit, is 0 for GPUs.
        pci = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    uuid = str(getattr(properties, "uuid", ""))
    # A virtual machine can report zeros for every device.
    return Device(name=str(device), identity=uuid if uuid.strip("GPU-0") else "", pci=pci)


def device_name(device: torch.device) -> str:
    """Returns the product name of the device, such as `NVIDIA H200`, or the CPU model."""
    if device.type != "cpu":
        return str(torch.get_device_module(device.type).get_device_name(device))
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as file:
        models = (line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
        return next(models, platform.processor() or platform.machine())
    return platform.processor() or platform.machine()
