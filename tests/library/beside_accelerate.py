"""The same loop with Accelerate and with the library, for ranks of one world; rank 0 prints the results.

Usage: beside_accelerate.py accelerate|library PARTS BATCH_SIZE NUM_SAMPLES. A step of PARTS * BATCH_SIZE
samples per rank is divided into PARTS.
"""

from __future__ import annotations

import os
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

kind, (parts, batch_size, num_samples) = sys.argv[1], map(int, sys.argv[2:])
torch.set_default_dtype(torch.float64)


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x = torch.randn(num_samples, 8)
    return model, optimizer, TensorDataset(x, x.sum(1, keepdim=True), torch.arange(num_samples))


def with_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts)
    model, optimizer, dataset = make()
    loader = DataLoader(dataset, batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, seen = [], []
    for _ in range(2):
        for x, y, number in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach().clone(), "mean").item())
            seen += accelerator.gather_for_metrics(number).tolist()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        report(losses, seen, accelerator.unwrap_model(model))
    accelerator.wait_for_everyone()
    # DDP's reducer would hold the last reference to the process group, and freeing it can deadlock with a
    # thread of gloo that still needs the GIL (see wait_for_gloo.py). Processes then did not end.
    os._exit(0)


def with_library():
    import ddp_hpc

    with ddp_hpc.distributed() as world:
        model, optimizer, dataset = make()
        wrapped = ddp_hpc.wrap(model)
        loader = world.loader(DataLoader(dataset, batch_size=parts * batch_size), epochs=2)
        losses, seen = [], []
        for batch in loader:
            for part in batch.micro_batches(parts, wrapped):
                x, y, number = part.data
                loss = (wrapped(x) - y).square().mean() * part.weight
                loss.backward()
                losses.append(world.mean(loss * parts).item())
                seen += world.gather_samples(number, part).tolist()
            optimizer.step()
            optimizer.zero_grad()
        if world.is_first:
            report(losses, seen, model)


def report(losses, seen, model):
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print("result", repr([losses, seen, weights.tolist()]), flush=True)


with_accelerate() if kind == "accelerate" else with_library()
