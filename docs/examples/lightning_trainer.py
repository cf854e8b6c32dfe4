"""Lightning's Trainer under any launcher, resumed after the walltime.

Usage: lightning_trainer.py STEPS DIRECTORY
"""

import os
import sys
import time

import lightning.pytorch as pl
import torch
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ddp_hpc.integrations.lightning import StopBeforeDeadline

num_steps, directory = int(sys.argv[1]), sys.argv[2]
# `ddp-hpc exec`, which job scripts contain, and torchrun set these variables.
rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
STEP_S = 0.3  # the duration of a step of a larger model


class Sum(pl.LightningModule):
    """Learns the sum of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Returns the loss of a batch."""
        (samples,) = batch
        if self.trainer.is_global_zero:
            print(f"trained step {self.global_step}", flush=True)
        time.sleep(STEP_S)
        return (self.layer(samples) - samples.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.1)


pl.seed_everything(0)
stop = StopBeforeDeadline(directory, margin_s=10)
trainer = pl.Trainer(
    max_steps=num_steps,
    strategy="ddp",
    devices=ranks_per_node,
    num_nodes=num_ranks // ranks_per_node,
    callbacks=[stop],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
model = Sum()
dataset = TensorDataset(torch.randn(80, 8))
# Its order depends only on the seed and the epoch: a resumed epoch has the same order.
sampler = DistributedSampler(dataset, num_ranks, rank)
loader = StatefulDataLoader(dataset, batch_size=4, sampler=sampler)
trainer.fit(model, loader, ckpt_path=stop.newest_checkpoint())
if trainer.is_global_zero:
    print("weights", model.layer.weight.detach().cpu().numpy().tobytes().hex(), flush=True)
