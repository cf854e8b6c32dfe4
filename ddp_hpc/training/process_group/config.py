"""Options of the ranks and of torch's process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddp_hpc.base.errors import nearest
from ddp_hpc.base.option_names import OptionError, named
from ddp_hpc.base.options import check_values, option
from ddp_hpc.discovery.world import DISCOVERIES

Backend = Literal["auto", "nccl", "gloo", "mpi", "xccl"]
DeviceKind = Literal["auto", "cuda", "cpu", "xpu"]


@dataclass(frozen=True, kw_only=True)
class ProcessGroupConfig:
    """The options for the discovery of the ranks, their devices and their communication backend.

    Raises:
        RequestError: values contradict each other, or one is out of range.
    """

    discovery: str = option(
        "auto",
        "Source of the rank and the world size: auto, " + ", ".join(DISCOVERIES[1:]) + ".",
        metavar="NAME",
    )
    backend: Backend = option("auto", "Communication backend; auto selects NCCL on GPUs and gloo on CPUs.")
    device: DeviceKind = option("auto", "Type of device to train on.")
    threads: int | None = option(
        None, "Number of CPU threads per rank.", above=0, shown_default="the cores that the rank may use"
    )
    single_rank_group: bool = option(
        False,
        "Create a process group for a single rank too, so that DDP, ZeRO, FSDP and NCCL can be tested on one "
        "GPU.",
    )
    init_timeout_s: float = option(
        300.0,
        "Time in seconds within which all ranks must connect.",
        flag="--init-timeout",
        argument="init_timeout_s",
        above=0,
    )
    timeout_s: float = option(
        1800.0,
        "Time limit in seconds for one collective operation, and for the creation of the data file.",
        flag="--timeout",
        argument="timeout_s",
        above=0,
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.discovery not in DISCOVERIES:
            hint = nearest(self.discovery, DISCOVERIES)
            remedy = f"Use one of {', '.join(DISCOVERIES)}."
            raise OptionError("discovery", repr(self.discovery), f"is unknown{hint}", remedy)
        if self.backend == "nccl" and self.device in ("cpu", "xpu"):
            remedy = f"Remove it, or {named('device')} {self.device}."
            raise OptionError("backend", "nccl", "supports only CUDA tensors", remedy)
