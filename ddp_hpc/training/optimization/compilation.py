"""torch.compile on many ranks: one rank of a node compiles, the others find its code in the node's cache.

Without that order each rank compiles the same (https://github.com/pytorch/pytorch/issues/170621), and
on a busy node one of them may take longer than the others wait in their first collective.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ddp_hpc.training.parallel.make_strategy import Strategy

# `- 0/0: tensor 'x' size mismatch at index 0. expected 32, actual 20`
_REASON = re.compile(r"^\s*- \d+/\d+: (.*)$", re.MULTILINE)
_RECOMPILES = "torch._dynamo.guards.__recompiles"


def compile_modules(modules: Iterable[nn.Module], mode: str) -> None:
    """Lets each module be compiled when it is first called. In place: names of parameters stay.

    `Module.compile` leaves torch's own classes, such as nn.Transformer and nn.Sequential, as they
    are, without a word (seen with torch 2.13): it compiles a caller of `forward` that is in
    torch's list of frames to skip.
    """
    for module in modules:
        module.forward = torch.compile(module.forward, mode=None if mode == "default" else mode)


def warm_up(strategy: Strategy, src: Tensor, tgt: Tensor) -> str:
    """Compiles forward and backward, on each node one rank first; how that went, for people.

    Changes neither parameters nor buffers, but the random numbers that come next. Where a forward
    pass is collective nothing is done before the first step. Collective: every rank must call this.

    Gradients are asked for, not accumulated: accumulating calls DDP's hooks, and a static graph would
    take its number of calls from this pass and wait in each step for more than come.
    """
    if strategy.forward_is_collective:
        return "in the first step, by all ranks at once"
    group, begin_s = strategy.group, time.monotonic()
    kept = {name: buffer.clone() for name, buffer in strategy.bare.named_buffers()}
    own_s = 0.0
    for turn in (True, False):
        if (group.world.local_rank == 0) is turn:
            start_s = time.monotonic()
            with strategy.as_in_a_step():
                loss = strategy.loss_of(strategy.bare, src, tgt)
            wanted = [parameter for parameter in strategy.parameters() if parameter.requires_grad]
            torch.autograd.grad(loss, wanted, allow_unused=True)
            own_s = time.monotonic() - start_s
        group.comm.barrier("torch.compile on the first rank of each node (--timeout)")
    for name, buffer in strategy.bare.named_buffers():
        buffer.copy_(kept[name])
    slowest_s = max(group.comm.allgather(own_s))
    return f"in {time.monotonic() - begin_s:.1f} s, the slowest rank's own part {slowest_s:.1f} s"


class Compiled(logging.Handler):
    """How often torch compiled again, and why; torch tells that its log, which it would print on every rank.

    Where the user asked for torch's own log by TORCH_LOGS, nothing is changed and nothing counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []
        if "TORCH_LOGS" not in os.environ:
            torch._logging.set_logs(recompiles=True)  # type: ignore[attr-defined]  # a public one, by its docs
            logger = logging.getLogger(_RECOMPILES)
            logger.handlers[:] = [self]
            logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """One recompile: the line of its text that names the guard which failed."""
        found = _REASON.search(record.getMessage())
        self.reasons.append(found[1].strip() if found else "torch gave no reason")

    def __str__(self) -> str:
        """`recompiled 2 times: REASON; REASON`, or nothing."""
        if not self.reasons:
            return ""
        times = f"{len(self.reasons)} time{'s' * (len(self.reasons) > 1)}"
        return f"recompiled {times}: {'; '.join(dict.fromkeys(self.reasons[:3]))}"
