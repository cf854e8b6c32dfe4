"""Runs a training on a CPU that reads its losses a step later, as on a GPU."""

from unittest import mock

from ddp_hpc import train
from ddp_hpc.training import trainer
from ddp_hpc.training.step import Pending


def main(argv: list[str]) -> None:
    with mock.patch.object(trainer, "Pending", side_effect=lambda **_: Pending(delay=1)):
        train.main(argv)
