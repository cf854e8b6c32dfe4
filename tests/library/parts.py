"""Ranks that check micro-batches, gathered values and workers; they print one line and exit with 0.

parts.py ddp|fsdp       micro-batches have the gradients of the whole batch, also in a smaller last step
parts.py gather         values of all samples, and shapes that differ between ranks
parts.py workers        a DataLoader with workers
parts.py static         a static graph
parts.py objects        an object whose state differs between ranks
"""

from __future__ import annotations

import sys
from itertools import chain

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ddp_hpc


class Numbers(Dataset):
    def __len__(self):
        return 21

    def __getitem__(self, index):
        return torch.full((4,), index / 21, dtype=torch.float64), index


class State:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def gradients(world, strategy, num):
    torch.manual_seed(0)
    model = ddp_hpc.wrap(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)).double(), strategy=strategy)
    found = []
    for batch in world.loader(Numbers(), batch_size=5):  # the last step has one sample, on rank 0
        for number, part in enumerate(batch.micro_batches(num, model), 1):
            if strategy == "ddp":
                assert model.require_backward_grad_sync == (number == num)
            (model(part.src).square().mean() * part.weight).backward()
        if strategy == "ddp":
            assert model.require_backward_grad_sync
        grads = [parameter.grad for parameter in model.parameters()]
        found += [grad.full_tensor() if strategy == "fsdp" else grad.clone() for grad in grads]
        model.zero_grad()
    assert len(found) == 12
    return found


def main(argv):
    [kind] = argv
    with ddp_hpc.distributed() as world:
        if kind in ("ddp", "fsdp"):
            whole = gradients(world, kind, 1)
            for num in (2, 3, 7):
                for ours, theirs in zip(gradients(world, kind, num), whole, strict=True):
                    torch.testing.assert_close(ours, theirs)
        elif kind == "workers":
            loader = world.loader(DataLoader(Numbers(), batch_size=5, shuffle=True, num_workers=2), epochs=2)
            gathered = [world.gather_samples(batch.tgt, batch).tolist() for batch in loader]
            for epoch in range(2):
                assert sorted(chain(*gathered[3 * epoch : 3 * epoch + 3])) == list(range(21))
        elif kind == "objects":
            model = ddp_hpc.wrap(nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            objects = {"same": State({"n": 1}), "own": State(torch.tensor([world.rank]))}
            with ddp_hpc.snapshots("run", model=model, optimizer=optimizer, **objects) as snapshots:
                snapshots.step(1)
        elif kind == "static":
            model = ddp_hpc.wrap(nn.Linear(4, 1), static_graph=True)
            [batch] = world.loader(Numbers(), batch_size=11)
            list(batch.micro_batches(2, model))
        else:
            for batch in world.loader(Numbers(), batch_size=5, shuffle=False):
                values = {"number": batch.tgt, "is_odd": batch.tgt % 2 == 1, "x": (batch.src,)}
                gathered = world.gather_samples(values, batch)
                first = 10 * (batch.step - 1)
                expected = torch.arange(first, min(first + 10, 21))
                assert torch.equal(gathered["number"], expected)
                assert torch.equal(gathered["is_odd"], expected % 2 == 1)
                assert gathered["x"][0].shape == (len(expected), 4)
                assert world.mean(torch.tensor(float(world.rank))).item() == 0.5
            world.gather_samples(torch.zeros(1, 3 + world.rank), batch)
        world.say("checked")
    sys.exit(0)
