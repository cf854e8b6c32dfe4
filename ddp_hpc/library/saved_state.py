"""What `ddp_hpc.snapshots` saves: the models, optimizers and other objects of a user's loop."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.library.connected_world import ConnectedWorld
from ddp_hpc.training.snapshots.host_buffer import Tensors, specs_of
from ddp_hpc.training.snapshots.state_dict_codec import object_tensors
from ddp_hpc.training.snapshots.training_state import TrainingState, live_tensors

T = TypeVar("T")
# This limit is larger than the state of a random number generator.
_MOST_COMPARED_BYTES = 2**16
_ARTICLE = {"model": "a", "optimizer": "an"}
OneOrMore: TypeAlias = T | list[T] | tuple[T, ...] | Mapping[str, T]


def by_name(what: str, given: Any, kind: type[T]) -> dict[str, T]:
    """Returns the objects by name: "" for a single one, and "0", "1", ... for those of a list.

    Raises:
        RequestError: a value has another type, or there is none.
    """
    objects: dict[str, Any] = {"": given}
    if isinstance(given, Mapping):
        objects = {str(name): value for name, value in given.items()}
    elif isinstance(given, list | tuple):
        objects = {str(number): value for number, value in enumerate(given)}
    wrong = [type(value).__name__ for value in objects.values() if not isinstance(value, kind)]
    if wrong or not objects:
        raise RequestError(
            f"ddp_hpc.snapshots({what}=): {_ARTICLE[what]} {kind.__name__}, or a list or dict of several, is "
            f"required (got {wrong[0] if wrong else 'none'})"
        )
    return objects


def state_of(
    world: ConnectedWorld,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    objects: Mapping[str, Any],
) -> TrainingState:
    """Returns the state to be saved. Tensors of a model have its name as a prefix, if it has one."""
    tensors = {
        f"{name}.{key}" if name else key: value
        for name, model in models.items()
        for key, value in live_tensors(_bare(world, model)).items()
    }
    stateful = {name: _complete(value) for name, value in objects.items()}
    return TrainingState(
        group=world.group,
        model=tensors,
        optimizers=tuple(optimizers.values()),
        whole=specs_of(tensors),
        objects={**stateful, "_optimizers": _OptimizerValues(tensors, optimizers.values())},
    )


def _bare(world: ConnectedWorld, model: nn.Module) -> nn.Module:
    """Returns the model without the wrappers of torch.compile and `wrap`, which change the names."""
    while isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
        model = compiled
    return next(
        (strategy.bare for strategy in world.shared if model in (strategy.model, strategy.bare)), model
    )


def check_objects(objects: Mapping[str, Any], options: Iterable[str]) -> None:
    """Raises RequestError if an object has no `state_dict`. `options` are the names of other arguments."""
    for name, value in objects.items():
        if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
            raise RequestError(
                f"ddp_hpc.snapshots({name}=) got {type(value).__name__}, which has no state_dict and "
                f"load_state_dict{nearest(name, list(options))}"
            )


def check_state(state: TrainingState) -> None:
    """Raises RequestError if the state would not be saved or restored completely."""
    object_tensors(state.objects)
    free = {id(tensor) for tensor in state.model.values()}
    for optimizer in state.optimizers:
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if id(parameter) not in free:
                raise RequestError(
                    f"ddp_hpc.snapshots(): a parameter of shape {tuple(parameter.shape)} of "
                    f"{type(optimizer).__name__} belongs to no model, or to two optimizers; pass all models, "
                    "and create each optimizer from a model that wrap() has returned"
                )
            free.discard(id(parameter))


def differing_objects(state: TrainingState) -> list[str]:
    """Returns the names of the objects whose states differ between ranks. Collective.

    Large tensors and those on a device, such as the averages of a model, are not compared.
    """
    own = {}
    for name, value in state.objects.items():
        digest = 0
        for tensor in object_tensors({name: value}).values():
            if tensor.device.type == "cpu" and tensor.nbytes <= _MOST_COMPARED_BYTES:
                digest = zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data, digest)
        own[name] = digest
    return state.group.comm.combine(own, _differing_names)


def _differing_names(of_ranks: list[dict[str, int]]) -> list[str]:
    names = dict.fromkeys(name for theirs in of_ranks for name in theirs)
    return [name for name in names if any(theirs.get(name) != of_ranks[0].get(name) for theirs in of_ranks)]


class _WithLearningRates:
    """A scheduler together with the options of its optimizer that it changes, such as the learning rates."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the scheduler and the options of the optimizer."""
        groups = self._scheduler.optimizer.param_groups
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        return {"scheduler": self._scheduler.state_dict(), "optimizer": options}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restores the state of the scheduler and the options of the optimizer."""
        self._scheduler.load_state_dict(state["scheduler"])
        for group, options in zip(self._scheduler.optimizer.param_groups, state["optimizer"], strict=True):
            for key, value in options.items():
                if isinstance(group.get(key), Tensor):  # a compiled optimizer keeps using this tensor
                    group[key].copy_(value)
                else:
                    group[key] = value


class _WithoutDdp:
    """A module, such as the average of a model, with the same tensor names for any number of ranks."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, with the names that it has with a single rank."""
        return {self._name(key): value for key, value in self._module.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restores the state."""
        self._module.load_state_dict({key: state[self._name(key)] for key in self._module.state_dict()})

    def _name(self, key: str) -> str:
        for name, module in self._module.named_modules():
            if isinstance(module, DistributedDataParallel):
                prefix = f"{name}." if name else ""
                if key.startswith(f"{prefix}module."):
                    return prefix + key.removeprefix(f"{prefix}module.")
        return key


def _complete(value: Any) -> Any:
    """Wraps an object if its own state does not contain everything that must be restored."""
    if isinstance(value, nn.Module):
        return _WithoutDdp(value)
    return _WithLearningRates(value) if isinstance(getattr(value, "optimizer", None), Optimizer) else value


class _OptimizerValues:
    """The values of optimizers that are not tensors, such as the step counts of Adafactor and LBFGS."""

    def __init__(self, model: Tensors, optimizers: Iterable[Optimizer]) -> None:
        self._model, self._optimizers = model, tuple(optimizers)

    def state_dict(self) -> list[dict[str, dict[str, Any]]]:
        """Returns the values by parameter, for each optimizer."""
        return [
            {
                name: values
                for name, parameter in self._model.items()
                if parameter in optimizer.state and (values := _without_tensors(optimizer.state[parameter]))
            }
            for optimizer in self._optimizers
        ]

    def load_state_dict(self, state: list[dict[str, dict[str, Any]]], /) -> None:
        """Adds the values to the states of the optimizers, whose tensors have been restored."""
        for optimizer, by_parameter in zip(self._optimizers, state, strict=True):
            for name, values in by_parameter.items():
                optimizer.state[self._model[name]].update(values)


def _without_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not isinstance(value, Tensor | None)}
