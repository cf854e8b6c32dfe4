"""Options of the ranks and of torch's process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import click

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.base.options import check_ranges, option
from ddp_hpc.discovery.world import DISCOVERIES

Backend = Literal["auto", "nccl", "gloo", "mpi", "xccl"]
DeviceKind = Literal["auto", "cuda", "cpu", "xpu"]


def _read_discovery(flag: str, text: str) -> str:
    if text not in DISCOVERIES:
        raise click.BadParameter(
            f"{text!r} is not one of {', '.join(DISCOVERIES)}{nearest(text, DISCOVERIES)}.",
            param_hint=f"'{flag}'",
        )
    return text


@dataclass(frozen=True, kw_only=True)
class ProcessGroupConfig:
    """The options for the discovery of the ranks, their devices and their communication backend.

    Raises:
        RequestError: values contradict each other, or one is out of range.
    """

    discovery: str = option(
        "auto",
        "Source of the rank and the world size: auto, " + ", ".join(DISCOVERIES[1:]) + ".",
        read=_read_discovery,
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
        300.0, "Time in seconds within which all ranks must connect.", flag="--init-timeout", above=0
    )
    timeout_s: float = option(
        1800.0,
        "Time limit in seconds for one collective operation, and for the creation of the data file.",
        flag="--timeout",
        above=0,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.backend == "nccl" and self.device in ("cpu", "xpu"):
            raise RequestError(
                f"--backend nccl supports only CUDA tensors. Remove it, or --device {self.device}."
            )
