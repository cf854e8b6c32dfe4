"""The progress of a training, from the last progress line in its log."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from ddp_hpc.schedulers.job_state import duration_s

_LINE = re.compile(
    r"epoch [0-9]+/[0-9]+ step ([0-9]{1,15})/([0-9]{1,15}) loss (\S{1,32}) \S+ samples/s eta (\S{1,16})"
)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The last completed step of a training. `left_s` is the estimated remaining time. None means unknown."""

    step: int
    num_steps: int
    loss: float | None = None
    left_s: int | None = None


def progress_in(log: str) -> Progress | None:
    """Returns the progress in the last progress line of a log; None if it has no such line."""
    lines = _LINE.findall(log)
    if not lines:
        return None
    step, num_steps, loss_text, eta = lines[-1]
    loss = None
    with suppress(ValueError):
        loss = float(loss_text)
    return Progress(step=int(step), num_steps=int(num_steps), loss=loss, left_s=duration_s(eta))
