"""Runs torch.compile on many ranks: one rank per node compiles, and the others use the node's cache.

Otherwise every rank would compile the same code (https://github.com/pytorch/pytorch/issues/170621), and on
a busy node a slow rank could exceed the time limit of the first collective.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable

import torch
from torch import nn

from ddp_hpc.base.units import counted

# A line of torch's log: `- 0/0: tensor 'x' size mismatch at index 0. expected 32, actual 20`
_REASON = re.compile(r"^\s*- \d+/\d+: (.*)$", re.MULTILINE)
_RECOMPILES = "torch._dynamo.guards.__recompiles"


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


class RecompilationLog(logging.Handler):
    """A log handler that collects the reasons for recompilations, which every rank would otherwise print.

    If the user has set TORCH_LOGS, nothing is changed and nothing is counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []
        if "TORCH_LOGS" not in os.environ:
            torch._logging.set_logs(recompiles=True)  # type: ignore[attr-defined]  # documented as public
            logger = logging.getLogger(_RECOMPILES)
            logger.handlers[:] = [self]
            logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Stores the reason for a recompilation, which is the guard that failed."""
        found = _REASON.search(record.getMessage())
        self.reasons.append(found[1].strip() if found else "torch gave no reason")

    def __str__(self) -> str:
        """Formats the count as `recompiled 2 times: REASON; REASON`, or as an empty string for none."""
        if not self.reasons:
            return ""
        times = counted(len(self.reasons), "time")
        return f"recompiled {times}: {'; '.join(dict.fromkeys(self.reasons[:3]))}"
