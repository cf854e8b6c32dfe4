"""Ranks that train two models with everything that a loop can have: started, interrupted and resumed.

Usage: whole_loop.py DIRECTORY. With INTERRUPT_AT=N, the last rank receives SIGTERM in step N.
Rank 0 prints the losses and, at the end, the weights.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ddp_hpc
from ddp_hpc.training.run import stop_protocol

stop_protocol.EXCHANGE_S = 0.0  # each step exchanges signals
NUM_SAMPLES = 42


class Samples(Dataset):
    """Samples with random noise, so that a resumed run needs the states of the generators."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        x = torch.full((4,), index / NUM_SAMPLES) + 0.1 * torch.rand(4)
        return {"x": x, "y": x.sum(0, keepdim=True), "number": index}


def main():
    with ddp_hpc.distributed() as world:
        torch.manual_seed(0)
        models = {
            "encoder": ddp_hpc.wrap(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2))),
            "head": ddp_hpc.wrap(nn.Linear(8, 1)),
        }
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models.values()]
        schedulers = [torch.optim.lr_scheduler.OneCycleLR(one, 0.05, 40) for one in optimizers]
        average = torch.optim.swa_utils.AveragedModel(models["head"])
        batch_size = int(os.environ.get("BATCH_SIZE", "5"))
        loader = world.loader(DataLoader(Samples(), batch_size=batch_size, shuffle=True), epochs=3)
        torch.manual_seed(100 + world.rank)  # ranks draw different dropout masks
        with ddp_hpc.snapshots(
            sys.argv[1], model=models, optimizer=optimizers, loader=loader, every_steps=4,
            schedule0=schedulers[0], schedule1=schedulers[1], average=average,
        ) as snapshots:  # fmt: skip
            for batch in loader:
                if (
                    batch.step == int(os.environ.get("INTERRUPT_AT", "0"))
                    and world.rank == world.world_size - 1
                ):
                    os.kill(os.getpid(), signal.SIGTERM)
                total = torch.zeros(())
                for part in batch.micro_batches(2, *models.values()):
                    x, y = part.data["x"], part.data["y"]
                    loss = (models["head"](models["encoder"](x)) - y).square().mean() * part.weight
                    loss.backward()
                    total += loss.detach()
                for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                average.update_parameters(models["head"])
                numbers = world.gather_samples(batch.data["number"], batch)
                world.say(f"loss {batch.step} {world.mean(total).item()!r} {numbers.tolist()}")
                if snapshots.step(batch.step):
                    break
        if not world.stopped:
            values = [p for model in (*models.values(), average) for p in model.parameters()]
            world.say(f"weights {torch.cat([p.detach().flatten() for p in values]).numpy().tobytes().hex()}")


main()
