"""Runs a training on ranks that each report one visible GPU."""

from types import SimpleNamespace
from unittest import mock

import torch

from ddp_hpc import train


def main(argv: list[str]) -> None:
    gpus = SimpleNamespace(device_count=lambda: 1, set_device=lambda device: None)
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch.object(torch, "get_device_module", return_value=gpus),
    ):
        train.main(argv)
