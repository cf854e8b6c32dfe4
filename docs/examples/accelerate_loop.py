"""A training loop with Accelerate, resumed after the walltime.

Usage: accelerate_loop.py STEPS DIRECTORY
"""

import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

import ddp_hpc

num_steps, directory = int(sys.argv[1]), Path(sys.argv[2])
STEP_S = 0.3  # the duration of a step of a larger model

accelerator = Accelerator(
    # On CPUs without this argument, each rank would train alone.
    cpu=not torch.accelerator.is_available(),
    # The order of an epoch depends only on the seed and the epoch: a resumed epoch has the same order.
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
)
deadline = ddp_hpc.deadline(margin_s=10)
set_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(80, 8))
loader = DataLoader(dataset, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

step = max((int(path.parent.name) for path in directory.glob("*/complete")), default=0)
if step:
    accelerator.load_state(str(directory / str(step)))
while step < num_steps:
    epoch, first = divmod(step, len(loader))
    batches = accelerator.skip_first_batches(loader, first)
    batches.set_epoch(epoch)
    for (samples,) in batches:
        loss = (model(samples) - samples.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.is_main_process:
            print(f"trained step {step}", flush=True)
        time.sleep(STEP_S)
        step += 1
        if step == num_steps:
            break
        if deadline.should_stop():
            accelerator.save_state(str(directory / str(step)))
            accelerator.wait_for_everyone()
            (directory / str(step) / "complete").touch()
            deadline.requeue(step)

weights = accelerator.unwrap_model(model).weight
if accelerator.is_main_process:
    print("weights", weights.detach().cpu().numpy().tobytes().hex(), flush=True)
accelerator.end_training()
