"""Selects the device and the backend of a rank."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_hpc.discovery.rank_placement import Device
from ddp_hpc.discovery.world import World
from ddp_hpc.errors import RequestError

_BACKEND_OF = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}


def device_kind(wanted: str) -> str:
    """`cuda`, `xpu` or `cpu`: what was asked for, or the best there is.

    Raises:
        RequestError: where a device was asked for that is not here.
    """
    here = [
        kind
        for kind, there in (("cuda", torch.cuda.is_available()), ("xpu", torch.xpu.is_available()))
        if there
    ]
    if wanted == "auto":
        return here[0] if here else "cpu"
    if wanted != "cpu" and wanted not in here:
        raise RequestError(
            f"--device {wanted}: torch {torch.__version__} finds no {wanted} device on this node"
            f"{_why_no_cuda() if wanted == 'cuda' else ''}; use --device auto, or start the job on a GPU node"
        )
    return wanted


def _why_no_cuda() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return " (this torch was built without CUDA)"
    return ""


def choose_backend(wanted: str, kind: str) -> str:
    """The process group's backend for a kind of device.

    Raises:
        RequestError: where torch does not have the backend, or it cannot move this device's tensors.
    """
    backend = _BACKEND_OF[kind] if wanted == "auto" else wanted
    if backend == "nccl" and kind != "cuda":
        raise RequestError(
            "--backend nccl needs CUDA devices and there are none on this node; use --backend auto, "
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
            f"--backend {backend}: torch {torch.__version__} was built without it; use --backend auto"
        )
    return backend


def group_backends(backend: str, kind: str, *, cpu_offload: bool) -> str:
    """The backend as torch's process group takes it: one for each kind of device whose tensors are sent.

    Where gradients and states lie on the host, their norms and snapshots are put together there.
    """
    return f"cpu:gloo,{kind}:{backend}" if cpu_offload and kind != "cpu" else backend


def pick_device(kind: str, world: World, per_rank: int = 1) -> torch.device:
    """This rank's device, the first of several that follow one another.

    The local rank counts it out; where the scheduler shows each rank only a part
    of the node's devices (Slurm's --gpus-per-task shows one), the count starts again.

    Raises:
        RequestError: fewer devices are seen here than a rank is to have.
    """
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    if (count := module.device_count()) < per_rank:
        raise RequestError(
            f"--devices-per-rank {per_rank}: rank {world.rank} on {world.hostname} sees {count}; request "
            "more devices per rank from the scheduler, or use a smaller number"
        )
    device = torch.device(kind, world.local_rank % (count // per_rank) * per_rank)
    module.set_device(device)
    return device


def device_place(device: torch.device) -> Device:
    """What names a physical device anywhere: its UUID and its place on the PCI bus, as far as torch tells."""
    if device.type == "cpu":
        return Device()
    properties = torch.get_device_module(device.type).get_device_properties(device)
    pci = ""
    if all(hasattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device")):
        # Linux's spelling of the folder in sysfs; a GPU's function is 0.
        pci = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    uuid = str(getattr(properties, "uuid", ""))
    # A virtual machine may hide it behind zeros, which are then every device's.
    return Device(name=str(device), identity=uuid if uuid.strip("GPU-0") else "", pci=pci)


def device_name(device: torch.device) -> str:
    """What its maker calls the device, such as `NVIDIA H200`; of a CPU the model."""
    if device.type != "cpu":
        return str(torch.get_device_module(device.type).get_device_name(device))
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as file:
        found = (line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
        return next(found, platform.processor() or platform.machine())
    return platform.processor() or platform.machine()
