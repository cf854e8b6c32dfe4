"""Strategy with torch.nn.DataParallel: one process uses all GPUs of a node. It serves only for comparison.

DataParallel sends the parameters to each GPU in every step, runs the replicas in threads that share one
interpreter lock, and gathers all outputs on the first GPU. torch's documentation recommends
DistributedDataParallel instead, even on one node:
https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
"""

from __future__ import annotations

import torch
from torch import nn

from ddp_hpc.training.parallel.base import Strategy


class DataParallel(Strategy):
    """The strategy that uses all GPUs of the node in one process; without a GPU, it runs the plain model."""

    calls_task_model = False

    def _prepare(self) -> nn.Module:
        self.bare.to(self.group.device)
        if self.group.device.type == "cpu":
            return torch.nn.DataParallel(self.bare, device_ids=[])
        return torch.nn.DataParallel(self.bare)
