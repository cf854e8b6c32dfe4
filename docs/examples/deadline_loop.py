"""Plain DDP that stops before the end of the walltime with ddp_hpc.deadline, and is resumed by another job.

Usage: deadline_loop.py STEPS CHECKPOINT
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_hpc

num_steps, checkpoint = int(sys.argv[1]), Path(sys.argv[2])
STEP_S = 0.3  # the duration of a step of a larger model

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
deadline = ddp_hpc.deadline(margin_s=10)
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
)
if device.type == "cuda":
    torch.cuda.set_device(device)  # should_stop() and requeue() communicate on the current device
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1).to(device))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
first = 0
if checkpoint.exists():
    state = torch.load(checkpoint, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]

for step in range(first, num_steps):
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    samples = torch.randn(4, 8, generator=generator).to(device)
    loss = (model(samples) - samples.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(STEP_S)
    if dist.get_rank() == 0:
        print(f"trained step {step}", flush=True)
    if step + 1 < num_steps and deadline.should_stop():
        if dist.get_rank() == 0:
            state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{checkpoint}.new")
            Path(f"{checkpoint}.new").replace(checkpoint)
        deadline.requeue(step + 1)

if dist.get_rank() == 0:
    print("weights", model.module.weight.detach().cpu().numpy().tobytes().hex(), flush=True)
dist.destroy_process_group()
