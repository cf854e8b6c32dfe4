"""A program for ranks that starts a model with several strategies, and compares it with one in memory."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import torch

import ddp_hpc
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.parallel.make_strategy import make_strategy
from ddp_hpc.training.snapshots.dtensor_shards import is_sharded, local_shard, place_of_shard
from ddp_hpc.training.task_setup import set_up
from ddp_hpc.training.tasks.initial_values import named_tensors
from ddp_hpc.training.tasks.task import make_task


def main(argv: list[str]) -> None:
    """`argv`: the model, and meshes. Each rank writes what it found to seen-RANK.json."""
    model, *meshes = argv
    factory = getattr(importlib.import_module(model.split(":")[0]), model.split(":")[1])
    seen = {}
    with ddp_hpc.distributed(threads=1) as world:
        for mesh in meshes:
            config = TrainConfig.of(model=model, mesh=mesh, seed=5)
            task, samples, initial = set_up(config, world.group, world.progress)
            after = torch.get_rng_state()
            was_on_meta = all(tensor.is_meta for tensor in named_tensors(task.model).values())
            freed = sum(recipe.kept is None for recipe in initial.recipes.values()) if initial else 0
            shared = make_strategy(task, world.group, config.parallel, config.optimization, initial)
            plain = make_task(model, factory, None, 0.1, {}, 5)
            found = named_tensors(shared.bare)
            wrong, checked = [], 0
            for name, tensor in named_tensors(plain.model).items():
                if found[name].is_meta:
                    continue
                checked += 1
                shard, offset = local_shard(found[name].detach()), place_of_shard(found[name]).offset
                own = tuple(slice(b, b + s) for b, s in zip(offset, shard.shape, strict=True))
                if not torch.equal(shard, tensor[own]) or found[name].dtype != tensor.dtype:
                    wrong.append(name)
            seen[mesh] = {
                "was_on_meta": was_on_meta,
                "freed": freed,
                "wrong": wrong,
                "checked": checked,
                "on_meta": sum(tensor.is_meta for tensor in found.values()),
                "sharded": sum(is_sharded(tensor) for tensor in found.values()),
                "same_ties": _ties(found) == _ties(named_tensors(plain.model)),
                "same_generator": torch.equal(after, torch.get_rng_state()),
                "same_data": torch.equal(task.dataset[0], plain.dataset[0]),
                "sum": next(iter(found.values())).sum().item() if model.endswith("random") else None,
            }
            samples.close()
        Path(f"seen-{world.rank}.json").write_text(json.dumps(seen))
    raise SystemExit(0)


def _ties(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """The names of each tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())
