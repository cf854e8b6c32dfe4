"""A Transformer on many GPUs, without ddp_hpc: ranks from mpi4py, local ranks from PALS, gradients by DDP."""

import argparse
import os
import socket

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--num-samples", type=int, default=2048)
parser.add_argument("--embedding", type=int, default=512)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--no-shuffle", action="store_true")
args = parser.parse_args()

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
# Only PALS sets this variable. Without it, all ranks are assumed to be on one node.
local_rank = int(os.environ.get("PALS_LOCAL_RANKID", rank))
fabric = ".hsn.cm.polaris.alcf.anl.gov" if "PALS_LOCAL_RANKID" in os.environ else ""
os.environ["MASTER_ADDR"] = comm.bcast(socket.gethostname() + fabric, root=0)
os.environ.setdefault("MASTER_PORT", "2345")
os.environ["RANK"] = str(rank)
os.environ["WORLD_SIZE"] = str(size)
if torch.cuda.is_available():
    backend, device = "nccl", torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
else:
    backend, device = "gloo", torch.device("cpu")
dist.init_process_group(backend, init_method="env://")

torch.manual_seed(0)
src = torch.rand(args.num_samples, 1, args.embedding)
tgt = torch.rand(args.num_samples, 20, args.embedding)
dataset = TensorDataset(src, tgt)
sampler = DistributedSampler(dataset, num_replicas=size, rank=rank, shuffle=not args.no_shuffle)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)

model = torch.nn.Transformer(args.embedding, dropout=args.dropout, batch_first=True)
model = DistributedDataParallel(model.to(device), device_ids=[device] if backend == "nccl" else None)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001 * size)
loss_of = torch.nn.CrossEntropyLoss()

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for src, tgt in loader:
        src, tgt = src.to(device), tgt.to(device)
        optimizer.zero_grad()
        loss = loss_of(model(src, tgt), tgt)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch + 1} loss {mean.item() / size:.6f}")

dist.destroy_process_group()
