"""Compiles a model before the first step."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ddp_hpc.training.parallel.make_strategy import Strategy


def warm_up(strategy: Strategy, src: Tensor, tgt: Tensor) -> str:
    """Compiles the forward and backward pass, first on one rank per node; returns a line for the log.

    Parameters and buffers do not change, but random numbers are drawn. If a forward pass is collective, the
    model is compiled in the first step instead. Collective: every rank must call this.

    The gradients are computed but not accumulated: accumulation calls DDP's hooks, and with a static
    graph DDP would count the calls of this pass and then wait for the same number in each step.
    """
    if strategy.forward_is_collective:
        return "in the first step, by all ranks at once"
    group, begin_s = strategy.group, time.monotonic()
    kept = {name: buffer.clone() for name, buffer in strategy.bare.named_buffers()}
    own_s = 0.0
    for is_first_of_node in (True, False):
        if (group.world.local_rank == 0) is is_first_of_node:
            start_s = time.monotonic()
            with strategy.as_in_a_step():
                loss = strategy.local_loss(src, tgt)
            wanted = [parameter for parameter in strategy.parameters() if parameter.requires_grad]
            torch.autograd.grad(loss, wanted, allow_unused=True)
            own_s = time.monotonic() - start_s
        group.comm.barrier("torch.compile on the first rank of each node (--timeout)")
    for name, buffer in strategy.bare.named_buffers():
        buffer.copy_(kept[name])
    slowest_s = group.comm.combine(own_s, max)
    return f"in {time.monotonic() - begin_s:.1f} s; the slowest rank needed {slowest_s:.1f} s"
