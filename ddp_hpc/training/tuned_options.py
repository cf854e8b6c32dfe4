"""Chooses the options of `--tuned`: those that make the steps of this training fast on its devices."""

from __future__ import annotations

import importlib.util
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.data.step_shards import Position, steps_left
from ddp_hpc.discovery.rank_communication import first_text
from ddp_hpc.training.config import TrainConfig, against_cuda_graph
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.run.directories import find_run_directories
from ddp_hpc.training.snapshots.snapshot_files import find_snapshots, step_of

# Compiling takes one to three minutes, and saves a fraction of a millisecond per step of a small model, and
# some ten milliseconds per step of a large one.
_MIN_STEPS_TO_COMPILE = 10_000
_ERROR = re.compile(r"^\s*[\w.]*(?:Error|Exception|Missing|InvalidCxxCompiler): .*", re.MULTILINE)
_MOST_CHARACTERS = 200


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


def choose_tuned(config: TrainConfig, group: Group, num_samples: int) -> Tuned:
    """Returns the configuration with the options that `--tuned` chooses, the same on every rank.

    Options that are already set are not changed. Collective: every rank must call this.
    """
    optimization = config.optimization
    own = [group.device.type == "cuda", _has_bf16(group)]
    is_gpu, has_bf16 = group.comm.combine(own, _on_all)
    if not is_gpu:
        return Tuned(config, f"--tuned changes nothing, because it needs CUDA devices, not {group.device}")
    choice = _Choice(config)
    if optimization.compile is None:
        num_steps = _steps_left(config, group, num_samples)
        against = _against_compile(config, num_steps) or why_not_compiling(group)
        choice.use("--compile", against, compile="default")
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


def _steps_left(config: TrainConfig, group: Group, num_samples: int) -> int:
    """Returns the number of steps after the newest snapshot, for strategies that can be compiled.

    With these, every rank has samples of its own. Collective: every rank must call this.
    """
    num_steps = steps_left(
        num_samples, config.data.batch_size, group.world.world_size, config.optimization.accumulate,
        config.epochs, Position(),
    )  # fmt: skip
    num_done = 0
    if group.world.rank == 0 and (directories := find_run_directories(config, os.environ)):
        with suppress(DdpHpcError):  # reported when the snapshot is read
            num_done = max(map(step_of, find_snapshots(directories.snapshots)), default=0)
    return max(0, min(num_steps, config.max_steps or num_steps) - group.comm.bcast(num_done))


def _against_compile(config: TrainConfig, num_steps: int) -> str:
    mesh = config.parallel.mesh or f"{config.parallel.strategy}="
    used = [
        kind for kind in ("tp", "pp") if kind in {part.partition("=")[0].strip() for part in mesh.split(",")}
    ]
    if used:
        return f"{used[0]} does not support it"
    if num_steps < _MIN_STEPS_TO_COMPILE:
        return (
            f"compiling takes minutes, which {num_steps:,} steps do not save; --tuned compiles for "
            f"{_MIN_STEPS_TO_COMPILE:,} or more. Add --compile to compile anyway"
        )
    return ""


def why_not_compiling(group: Group) -> str:
    """Compiles a small function on the first rank of each node; returns why this fails, or an empty string.

    Triton is a Python package, but needs a C compiler and Python.h when it starts a kernel. Many compute
    nodes have neither. Collective: every rank must call this.
    """
    problem = ""
    if group.device.type == "cuda" and importlib.util.find_spec("triton") is None:
        problem = "Triton is not installed"
    elif group.world.local_rank == 0:
        try:
            torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=group.device))
        except Exception as error:  # the errors of torch, Triton and of the compiler have no common class
            problem = f"{_reason(error)}. Compiled kernels need a C compiler and Python.h on each node"
    return group.comm.combine(problem, first_text)


def _reason(error: Exception) -> str:
    """Returns the innermost error in the message, in one line."""
    lines = _ERROR.findall(str(error)) or str(error).strip().splitlines() or [type(error).__name__]
    return str(lines[-1]).strip()[:_MOST_CHARACTERS].rstrip(".")


def _against_graph(config: TrainConfig, group: Group) -> str:
    if config.model.is_own:
        return (
            "a model of your own may read values of the GPU, which cannot be captured; if yours does not, "
            "add --cuda-graph"
        )
    if group.backend not in ("none", "nccl"):
        return f"--backend {group.backend}"
    return config.optimization.against_cuda_graph() or against_cuda_graph(config.parallel)


def _has_bf16(group: Group) -> bool:
    return group.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
