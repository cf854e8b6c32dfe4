"""A training without ddp-hpc. Like those of large frameworks, it trains alone if RANK is not set.

It prints one JSON object: rank and size of its world, the mean gradient of all ranks, and its variables.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank, size = 0, 1
gradient = 0.0
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), float(rank))).sum().backward()
    gradient = model.module.weight.grad.item()
    del model
    dist.destroy_process_group()
names = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_PORT",
)
printed = {"rank": rank, "size": size, "gradient": gradient, **{name: os.environ.get(name) for name in names}}
sys.stdout.write(json.dumps(printed) + "\n")
sys.stdout.flush()
# At the interpreter's shutdown the thread of gloo that frees the last collective cannot get the GIL, and
# torch aborts: 1 process in 100 on a busy machine, also without ddp-hpc (torch 2.13).
os._exit(0)
