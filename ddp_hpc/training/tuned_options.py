"""Chooses the options of `--tuned`: those that make the steps of this training fast on its devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ddp_hpc.base.errors import RequestError
from ddp_hpc.training.config import TrainConfig, against_cuda_graph
from ddp_hpc.training.process_group.group import Group


@dataclass(frozen=True)
class Tuned:
    """A configuration with the chosen options."""

    config: TrainConfig
    line: str
    """The options that were chosen, and why the others were not."""


@dataclass
class _Choice:
    config: TrainConfig
    used: list[str] = field(default_factory=list)
    omitted: list[str] = field(default_factory=list)

    def use(self, text: str, against: str, **options: Any) -> None:
        """Uses the options unless there is a reason `against` them or another option excludes them."""
        if not against:
            try:
                self.config = self.config.changed(**options)
                self.used.append(text)
                return
            except RequestError as error:
                against = str(error)
        self.omitted.append(f"no {text} ({against.rstrip('.')})")


def choose_tuned(config: TrainConfig, group: Group) -> Tuned:
    """Returns the configuration with the options that `--tuned` chooses, the same on every rank.

    Options that are already set are not changed. --compile, which takes minutes, is not chosen. Collective:
    every rank must call this.
    """
    optimization = config.optimization
    own = [group.device.type == "cuda", _has_bf16(group)]
    is_gpu, has_bf16 = group.comm.combine(own, _on_all)
    if not is_gpu:
        return Tuned(config, f"--tuned changes nothing, because it needs CUDA devices, not {group.device}")
    choice = _Choice(config)
    if optimization.amp == "off":
        against = "" if has_bf16 else "a GPU does not support bfloat16"
        if config.data.dtype == "float64":
            against = "--dtype float64"
        choice.use("--amp bf16", against, amp="bf16")
    if optimization.matmul_precision is None:
        choice.use("--matmul-precision high", "", matmul_precision="high")
    if not optimization.cuda_graph:
        choice.use("--cuda-graph", _against_graph(choice.config, group), cuda_graph=True)
    return Tuned(
        choice.config,
        f"--tuned: {', '.join([*choice.used, *choice.omitted]) or 'all options were already set'}",
    )


def _on_all(facts: list[list[bool]]) -> list[bool]:
    """Returns, for each fact, whether it holds on all ranks."""
    return [all(of_ranks) for of_ranks in zip(*facts, strict=True)]


def _against_graph(config: TrainConfig, group: Group) -> str:
    if config.model.is_own:
        return (
            "your own model may copy values from the GPU to the host, which cannot be captured; if it does "
            "not, add --cuda-graph"
        )
    if group.backend not in ("none", "nccl"):
        return f"--backend {group.backend}"
    return config.optimization.against_cuda_graph() or against_cuda_graph(config.parallel)


def _has_bf16(group: Group) -> bool:
    return group.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
