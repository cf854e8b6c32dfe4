"""Factories whose models are freed and computed again, although they are small."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from ddp_hpc.training.tasks import recorded_init, recorded_operations
from ddp_hpc.training.tasks.decoder import decoder
from ddp_hpc.training.tasks.task import SampleSpec, Task

recorded_init.RESIDENT_BYTES, recorded_operations.SMALLEST_BYTES = 0, 1
WIDTH = 12


def data() -> tuple[Tensor, Tensor]:
    """Samples from the global generator, like those of many scripts."""
    src = torch.rand(48, WIDTH, dtype=torch.float64)
    return src, src.sum(dim=1, keepdim=True)


class Block(nn.Module):
    """Two matrices, a buffer that is computed and not saved, and a frozen parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width).cumsum(0), persistent=False)
        self.shift = nn.Parameter(torch.randn(width) * 0.02, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) * self.scale + self.shift


class Net(nn.Module):
    """Blocks, some of which are copies, with initial values that are set at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first = Block(width)
        self.blocks = nn.ModuleList([first, copy.deepcopy(first), Block(width), Block(width)])
        self.head = nn.Linear(width, 1)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.trunc_normal_(parameter, std=0.2)
        nn.init.orthogonal_(self.blocks[2].up.weight)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plan(model: nn.Module) -> dict[str, Any]:
    """Splits the matrices of each block."""
    blocks = range(len(model.blocks))
    return {f"blocks.{i}.up": ColwiseParallel() for i in blocks} | {
        f"blocks.{i}.down": RowwiseParallel() for i in blocks
    }


def stages(model: nn.Module, num: int) -> list[nn.Module]:
    """Two stages of two blocks, or four of one."""
    parts = [nn.Sequential(*model.blocks[i : i + 4 // num]) for i in range(0, 4, 4 // num)]
    parts[-1].append(model.head)
    return parts


def net() -> Task:
    """A model for all strategies."""
    return Task(model=Net(WIDTH), dataset=data(), tensor_parallel=plan, stages=stages)


def half() -> Task:
    """A model whose parameters the factory converts to another type."""
    return Task(model=Net(WIDTH).to(torch.bfloat16), dataset=data(), tensor_parallel=plan, stages=stages)


def gpt(tied: bool = True) -> Task:
    """The built-in decoder, by default with tied weights."""
    tokens = torch.randint(0, 20, (16, 9))
    task = decoder(SampleSpec((8,), (8,), 20), 0.0, 4, 2, 16, tied)
    return Task(
        model=task.model,
        loss=task.loss,
        dataset=(tokens[:, :-1].clone(), tokens[:, 1:].clone()),
        tensor_parallel=task.tensor_parallel,
        stages=task.stages,
    )


def recurrent() -> Task:
    """A module that keeps further references to its parameters."""
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.GRUCell(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return Task(model=model, dataset=data())


def kept() -> Task:
    """A model that cannot be moved to the meta device."""
    task = net()
    task.model.reference = weakref.ref(task.model.head.weight)
    return task


def in_a_thread() -> Task:
    """A model of which a thread fills a part."""
    task = net()
    thread = threading.Thread(target=lambda: task.model.head.weight.data.fill_(0.25))
    thread.start()
    thread.join()
    return task


def unseen() -> Task:
    """A model of which a part is set in a way that is not recorded, as by some extensions in C++."""
    task = net()
    with torch.no_grad():
        task.model.head.weight.mul_(1)
        with torch._C._DisableTorchDispatch():
            task.model.head.weight.fill_(0.25)
        task.model.head.bias.mul_(1)
    return task


def random() -> Task:
    """A model whose values differ between the ranks."""
    task = net()
    with torch.no_grad():
        task.model.blocks[0].shift.fill_(int.from_bytes(os.urandom(4), "big") / 2**32)
    return task
