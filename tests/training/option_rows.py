"""Compares the gradients of combined options with those of plain torch: the options, and a program for ranks.

`main` reads rows of options as JSON, trains each of them, and writes the results.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import ddp_hpc
from ddp_hpc.base.errors import RequestError
from ddp_hpc.data.step_shards import Position, rank_shares
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.optimization.precision import AMP_DTYPES
from ddp_hpc.training.parallel.make_strategy import Strategy, make_strategy
from ddp_hpc.training.parallel.model_layers import checkpoint_activations
from ddp_hpc.training.parallel.warm_up import warm_up
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.step import Pending, Stepper
from ddp_hpc.training.tasks.split_layers import split_evenly
from ddp_hpc.training.tasks.task import Task
from ddp_hpc.training.telemetry.step_clock import StepClock

WIDTH, BLOCKS, GLOBAL_BATCH, STEPS = 256, 3, 8, 3
Options = dict[str, Any]


class Block(nn.Module):
    """Two linear layers, which tensor parallelism can split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, src: Tensor) -> Tensor:
        found: Tensor = src + self.down(self.up(src).tanh())
        return found


def new_model(dtype: torch.dtype) -> nn.Sequential:
    """The same model each time."""
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).to(dtype)


def new_task(dtype: torch.dtype) -> Task:
    """The model, with everything that the strategies require."""

    def plan(model: nn.Module) -> dict[str, Any]:
        del model
        pairs = [(f"{i}.up", ColwiseParallel()) for i in range(BLOCKS)]
        return {**dict(pairs), **{f"{i}.down": RowwiseParallel() for i in range(BLOCKS)}}

    def stages(model: nn.Module, num: int) -> list[nn.Module]:
        return [nn.Sequential(*part) for part, _ in split_evenly(list(model), num)]  # type: ignore[call-overload]

    return Task(model=new_model(dtype), tensor_parallel=plan, stages=stages)


def samples_of(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The samples of a step."""
    generator = torch.Generator().manual_seed(step)
    src = torch.rand(2, GLOBAL_BATCH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return src[0], src[1]


def plain_gradients(config: TrainConfig, dtype: torch.dtype) -> list[list[Tensor]]:
    """The gradients of each step just before its update, in one process with plain torch."""
    model = new_model(dtype)
    decay = config.optimization.weight_decay
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    name = config.optimization.optimizer
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = kind(groups, lr=config.optimization.lr, **momentum)
    found = []
    for step in range(STEPS):
        src, tgt = samples_of(step, dtype)
        optimizer.zero_grad()
        with torch.autocast(
            "cpu", dtype=AMP_DTYPES.get(config.optimization.amp), enabled=config.optimization.amp != "off"
        ):
            loss = nn.functional.mse_loss(model(src), tgt)
        loss.backward()
        if config.optimization.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.optimization.clip_norm)
        found.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
        optimizer.step()
    return found


class Graphs:
    """A backend of torch.compile that compiles nothing, and records when each backward graph runs.

    `replays`: gradients are in the same memory each time, like those of a CUDA graph.
    """

    def __init__(self) -> None:
        self.num = 0
        self.last = -1
        """The number of the graph whose forward pass ran last."""
        self.events: list[str] = []
        self.replays = False

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        number = self.num
        self.num += 1

        def forward(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            def call(*values: Any) -> Any:
                self.last = number
                return graph.forward(*values)

            return make_boxed_func(call)

        def backward(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            kept: list[Any] = []

            def call(*values: Any) -> Any:
                self.events.append("backward")
                found = graph.forward(*values)
                if not self.replays:
                    return found
                if not kept:
                    kept.extend(found)
                for old, new in zip(kept, found, strict=True):
                    if old is not None:
                        old.copy_(new)
                return [None if old is None else old.detach() for old in kept]

            return make_boxed_func(call)

        made: Callable[..., Any] = aot_autograd(
            fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition
        )(graph, inputs)
        return made

    @contextmanager
    def used(self) -> Iterator[None]:
        """A context in which torch.compile uses this backend."""
        real = torch.compile

        def compile_by_this(forward: Callable[..., Any], *, mode: str | None, dynamic: bool) -> Any:
            self.replays = mode in ("reduce-overhead", "max-autotune")
            return real(forward, backend=self, dynamic=dynamic)

        with mock.patch("torch.compile", compile_by_this):
            yield


def gradients_of(strategy: Strategy) -> dict[str, Tensor]:
    """The whole gradients of this rank, by the names of the model."""
    found = {}
    for name, parameter in strategy.bare.named_parameters():
        if (grad := parameter.grad) is not None:
            found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    return found


def watch_buckets(strategy: Strategy, events: list[str]) -> None:
    """Records when DDP sends a bucket."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def send(_, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations, and wants no strings
        events.append("all-reduce")
        return allreduce_hook(None, bucket)

    strategy.model.register_comm_hook(None, send)  # type: ignore[operator]


def measure(group: Group, options: Options, *, inductor: bool) -> dict[str, Any]:
    """The result of one row on this rank."""
    torch._dynamo.reset()
    half = options.get("amp", "off") != "off"
    dtype = torch.float32 if half else torch.float64
    graphs = Graphs()
    begin_s = time.monotonic()
    try:
        config = TrainConfig.of(lr=0.001, lr_scaling="none", **options)
        task = new_task(dtype)
        if config.parallel.activation_checkpointing:
            checkpoint_activations(task.model)
        with nullcontext() if inductor else graphs.used():
            strategy = make_strategy(task, group, config.parallel, config.optimization)
            found = train(group, config, strategy, dtype, graphs)
    except RequestError as error:
        return {"refused": str(error)}
    expected = plain_gradients(config, dtype)
    names = [name for name, _ in task.model.named_parameters()]
    far = 0.0
    for step, ours in enumerate(found):
        for name, plain in zip(names, expected[step], strict=True):
            if name in ours:
                far = max(far, ((ours[name] - plain).abs().max() / plain.abs().max()).item())
    return {
        "graphs": graphs.num,
        "events": graphs.events,
        "steps": len(found),
        "gradients": sum(len(ours) for ours in found),
        "far": far,
        "sums": [{name: grad.double().sum().item() for name, grad in ours.items()} for ours in found],
        "wall_s": time.monotonic() - begin_s,
    }


def train(
    group: Group, config: TrainConfig, strategy: Strategy, dtype: torch.dtype, graphs: Graphs
) -> list[dict[str, Tensor]]:
    """The gradients of each step just before its update."""
    size, rank = strategy.mesh.data_size, strategy.mesh.data_rank
    batch_size = GLOBAL_BATCH // size // config.optimization.accumulate
    if config.optimization.compile is not None:
        src, tgt = samples_of(0, dtype)
        warm_up(strategy, torch.zeros_like(src[:batch_size]), torch.zeros_like(tgt[:batch_size]))
    warm = graphs.num
    found: list[dict[str, Tensor]] = []

    def look(*_: Any) -> None:
        scaler, scale = strategy.precision.scaler, 1.0
        takes_scaled = getattr(strategy.optimizer, "_step_supports_amp_scaling", False)
        if scaler is not None and takes_scaled and config.optimization.clip_norm is None:
            scale = scaler.get_scale()
        found.append({name: grad / scale for name, grad in gradients_of(strategy).items()})

    strategy.optimizer.register_step_pre_hook(look)
    if config.parallel.bucket_mib is not None and config.parallel.compress_gradients is None:
        watch_buckets(strategy, graphs.events)
    position, shares = next(
        rank_shares(GLOBAL_BATCH, batch_size, size, rank, config.optimization.accumulate, Position())
    )

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(STEPS):
            src, tgt = samples_of(step, dtype)
            for share in shares:
                yield src[share.start : share.stop], tgt[share.start : share.stop]

    heartbeat = SimpleNamespace(at=lambda *_: None)
    stepper = Stepper(
        config.optimization,
        group,
        batches(),
        strategy,
        dtype,
        StepClock(group.device),
        heartbeat,
        size,
        STEPS,
    )
    graphs.events.clear()
    for _ in range(STEPS):
        stepper.one_step(position, shares, Pending())
    assert graphs.num == warm or strategy.forward_is_collective, "recompiled after the warm-up"
    return found


def main(argv: list[str]) -> None:
    """`argv`: the file of rows, the file for the results, and `inductor` or `graphs`."""
    rows, results, backend = argv
    found = []
    with ddp_hpc.distributed(threads=1) as world:
        for options in json.loads(Path(rows).read_text()):
            mine = measure(world.group, options, inductor=backend == "inductor")
            found.append([options, world.group.comm.allgather(mine)])
            if world.is_first:
                Path(results).write_text(json.dumps(found))
    raise SystemExit(0)
