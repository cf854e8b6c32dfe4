"""One replica on several devices: the stages run one after another, and activations are moved between them.

This is for a model that does not fit on one device. Only one device computes at a time; --strategy fsdp and
--strategy pp keep all devices busy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddp_hpc.training.parallel.model_layers import split_stages
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.tasks.task import Task


class Replica(nn.Module):
    """A model whose stages are on this rank's devices. It returns its output on the first device."""

    def __init__(self, task: Task, group: Group, num_devices: int) -> None:
        super().__init__()
        first = group.device
        self._devices = [
            first if first.type == "cpu" else torch.device(first.type, (first.index or 0) + number)
            for number in range(num_devices)
        ]
        stages = split_stages(task, num_devices)
        self.stages = nn.ModuleList(
            stage.to(device) for stage, device in zip(stages, self._devices, strict=True)
        )

    def forward(self, *inputs: Any) -> Any:
        """Returns the output of the model."""
        for stage, device in zip(self.stages, self._devices, strict=True):
            inputs = tuple(_to(value, device) for value in inputs)
            output = stage(*inputs)
            inputs = output if isinstance(output, tuple) else (output,)
        return _to(output, self._devices[0])


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
