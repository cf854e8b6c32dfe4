"""Runs torch.compile on many ranks: one rank per node compiles, and the others use the node's cache.

Otherwise every rank would compile the same code (https://github.com/pytorch/pytorch/issues/170621), and on
a busy node a slow rank could exceed the time limit of the first collective.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def compile_modules(modules: Iterable[nn.Module], mode: str) -> None:
    """Makes each module compile when it is first called, in place, so that parameter names do not change.

    Each batch size is compiled separately. By default, torch would compile the second size, that of a smaller
    last step, for all sizes, and would then use this slower code for the full batches too.

    `Module.compile` silently does not compile torch's own classes, such as nn.Transformer and
    nn.Sequential (torch 2.13): it compiles a caller of `forward` that is in torch's list of skipped
    frames.
    """
    for module in modules:
        module.forward = torch.compile(
            module.forward, dynamic=False, mode=None if mode == "default" else mode
        )
