"""The training loop of accelerate_loop.py with the library of ddp-hpc, resumed after the walltime.

Usage: library_loop.py STEPS DIRECTORY
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import ddp_hpc

num_steps, directory = int(sys.argv[1]), sys.argv[2]
STEP_S = 0.3  # the duration of a step of a larger model

with ddp_hpc.distributed() as world:
    torch.manual_seed(0)
    model = ddp_hpc.wrap(torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    dataset = TensorDataset(torch.randn(80, 8))
    loader = world.loader(DataLoader(dataset, batch_size=4, shuffle=True), max_steps=num_steps)
    with ddp_hpc.snapshots(directory, model=model, optimizer=optimizer, loader=loader) as snapshots:
        for batch in loader:
            (samples,) = batch.data
            loss = (model(samples) - samples.sum(1, keepdim=True)).square().mean() * batch.weight
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            world.say(f"trained step {batch.step - 1}")
            time.sleep(STEP_S)
            if snapshots.step(batch.step):
                break
    if not world.stopped:
        world.say(f"weights {next(model.parameters()).detach().cpu().numpy().tobytes().hex()}")
