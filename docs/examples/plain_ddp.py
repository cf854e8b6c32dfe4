"""Plain DDP, without ddp-hpc: saves a checkpoint when it receives SIGTERM, and resumes from the checkpoint.

Usage: plain_ddp.py STEPS CHECKPOINT
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

num_steps, checkpoint = int(sys.argv[1]), sys.argv[2]
is_stopped = False


def request_stop(*_: object) -> None:
    """Let the training loop stop after the current step."""
    global is_stopped
    is_stopped = True


def save(step: int) -> None:
    """Replace the checkpoint atomically."""
    if dist.get_rank() == 0:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, f"{checkpoint}.new")
        Path(f"{checkpoint}.new").replace(checkpoint)


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
signal.signal(signal.SIGTERM, request_stop)
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1).to(device))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
first = 0
if Path(checkpoint).exists():
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
    time.sleep(0.3)
    # All ranks stop after the same step: after the first one in which any rank has got the signal.
    stop = torch.tensor(float(is_stopped), device=device)
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"trained step {step}", flush=True)
    if stop.item():
        save(step + 1)
        dist.destroy_process_group()
        sys.exit(1)

save(num_steps)
if dist.get_rank() == 0:
    print("weights", model.module.weight.detach().cpu().numpy().tobytes().hex(), flush=True)
dist.destroy_process_group()
