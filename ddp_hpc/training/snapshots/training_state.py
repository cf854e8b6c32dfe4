"""Reads the state of a training run between two steps as named tensors, and restores it.

Names are those of the bare model: `encoder.layers.0.norm1.weight`, and
`optimizer.exp_avg/encoder.layers.0.norm1.weight`, regardless of the strategy. If every rank holds the whole
state, rank 0 writes it. Otherwise each rank writes its shards with their places in the whole tensors. So a
run can resume with another strategy, or another number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn

from ddp_hpc.base.errors import DataError
from ddp_hpc.base.option_names import named
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.snapshots.dtensor_shards import (
    is_first_copy,
    is_sharded,
    local_shard,
    place_of_shard,
    whole_tensor,
)
from ddp_hpc.training.snapshots.host_buffer import Place, Specs, Stream, Tensors, specs_of
from ddp_hpc.training.snapshots.random_state import generator_state, set_generator_state
from ddp_hpc.training.snapshots.snapshot_files import Snapshot
from ddp_hpc.training.snapshots.state_dict_codec import (
    PREFIX,
    Stateful,
    load_objects,
    object_names,
    object_tensors,
)
from ddp_hpc.training.snapshots.state_reader import StateReader

_OPTIMIZER = "optimizer."
_SCALER = "scaler."
_GENERATORS = "generators"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The live tensors of this rank's model and optimizer."""

    group: Group
    model: Tensors
    """The tensors of the model on this rank, by name: plain tensors, or DTensors with this rank's shard."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    """The optimizers that hold this rank's state; with ZeRO, the local optimizer that it wraps."""
    whole: Specs
    """Shape and dtype of each tensor of the whole model, including those that only other ranks hold."""
    scaler: torch.amp.GradScaler | None = None
    model_is_sharded: bool = False
    """Whether ranks hold different tensors, as in the stages of a pipeline."""
    optimizer_is_sharded: bool = False
    """Whether only one rank holds the optimizer state of a parameter, as with ZeRO."""
    at: Mapping[str, int] | None = None
    """This rank's index along each dimension of the device mesh in which ranks hold copies of tensors that
    are not sharded; None if all sharded tensors are sharded over all ranks."""
    objects: Mapping[str, Stateful] = field(default_factory=dict)
    """More objects with a state, by name. Rank 0's state is saved. A name that starts with an underscore may
    be missing in a snapshot."""

    @property
    def optimizer_names(self) -> str:
        """The types of the optimizers, such as `Adam`."""
        return ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank writes its shards, because no rank holds the whole state."""
        if self.model_is_sharded or self.optimizer_is_sharded:
            return True
        meshes = [value.device_mesh for value in self.model.values() if is_sharded(value)]  # type: ignore[attr-defined]
        world_size = self.group.world.world_size
        # Without `at`, it is unknown which ranks hold copies of a tensor on a part of the ranks.
        return bool(meshes) and (self.at is not None or all(m.size() == world_size for m in meshes))

    def model_tensors(self) -> Stream:
        """Returns the tensors of the model that this rank writes, not copies.

        If the state is not sharded, these are whole tensors, and both this method and the iteration are
        collective.
        """
        return self._stream({name: value.detach() for name, value in self.model.items()}, self._is_first)

    def training_tensors(self) -> Stream:
        """Returns the tensors of the optimizer, the objects and the random number generators that this rank
        writes, like `model_tensors`. Collective: every rank must call this.
        """
        of_optimizer = optimizer_tensors(self.model, self.optimizers)
        of_objects = object_tensors(self.objects)
        if self.scaler is not None:
            of_objects |= _scaler_tensors(self.scaler)
        world, device = self.group.world, self.group.device
        own = generator_state(device)
        if not self.is_sharded:
            # Only rank 0 needs these, but NCCL's gather would open a connection from every rank to rank 0.
            states = self.group.gather(own.to(device))
            if world.rank == 0:
                of_objects[_GENERATORS] = states.cpu()
            return self._stream({**of_optimizer, **of_objects}, self._is_first)
        first = self._stream(of_optimizer, lambda tensor: self.optimizer_is_sharded or self._is_first(tensor))
        # Each rank has its own objects; those of rank 0 are saved.
        second = self._stream(
            of_objects,
            lambda tensor: self._is_first(tensor) if is_sharded(tensor) else world.rank == 0,
        )
        specs = {**first.specs, **second.specs, _GENERATORS: ((1, own.numel()), own.dtype)}
        place = Place((world.world_size, own.numel()), (world.rank, 0))
        tensors = chain(first.tensors, second.tensors, [(_GENERATORS, own[None])])
        return Stream(specs, tensors, first.is_pinned, {**first.places, **second.places, _GENERATORS: place})

    @torch.no_grad()
    def non_finite(self) -> tuple[str, int] | None:
        """Returns the name of a non-finite trained parameter (the first of its data type) and the first rank
        that has one; None if all are finite.

        Buffers and frozen parameters are not checked: masks contain infinities. Waits for the device.
        Collective: every rank must call this.
        """
        device = self.group.device
        alike: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, value in self.model.items():
            if value.requires_grad and value.is_floating_point() and (shard := local_shard(value)).numel():
                alike.setdefault((shard.device, shard.dtype), {})[name] = shard
        names = [name for shards in alike.values() for name in shards]
        # A comparison with NaN is false.
        are_finite = [
            torch.stack(_largest([*some.values()])).lt(math.inf).to(device) for some in alike.values()
        ]
        end = torch.zeros(1, dtype=torch.bool, device=device)
        # The number of names from the first bad one on: 0 if there is none.
        num_left = len(names) - torch.cat([*are_finite, end]).int().argmin()
        of_ranks = self.group.gather(num_left).tolist()
        rank = next((rank for rank, number in enumerate(of_ranks) if number), None)
        if rank is None:
            return None
        own = [*names, ""][len(names) - of_ranks[self.group.world.rank]]
        return self.group.comm.combine(own, lambda of_rank: of_rank[rank]), rank

    def check(self, theirs: Specs, where: str) -> None:
        """Raises DataError if the tensors of a snapshot do not match this model."""
        if theirs == self.whole:
            return
        names = sorted({**self.whole, **theirs})
        name = next(name for name in names if self.whole.get(name) != theirs.get(name))
        seen, needed = (
            f"{specs[name][0]} {_dtype_name(specs[name][1])}" if name in specs else "absent"
            for specs in (theirs, self.whole)
        )
        raise DataError(
            f"the snapshot {where} is from a different model: {name} is {seen} in the snapshot, {needed} in "
            f"the model. Use the original options, or another {named('snapshot_dir')}"
        )

    def check_objects(self, saved: Iterable[str], where: str) -> None:
        """Raises DataError if the tensors are from a run with other objects."""
        theirs, ours = (
            ", ".join(sorted(name for name in names if not name.startswith("_"))) or "none"
            for names in (object_names(saved), set(self.objects))
        )
        if theirs != ours:
            raise DataError(
                f"the snapshot {where} contains the state of other objects: {theirs}, not {ours}. Use the "
                f"same objects as before, or another {named('snapshot_dir')}"
            )

    def restore(self, snapshot: Snapshot) -> bool:
        """Restores the state from a snapshot. Collective: every rank must call this.

        Returns False if the random number generators could not be restored, because the number of ranks or
        the kind of device has changed.

        Raises:
            DamagedSnapshotError: on all ranks, if the snapshot is damaged. The tensors of the model are then
                undefined; the rest of the state has not changed.
        """
        reader = StateReader(self.group)
        likes = {name: value.detach() for name, value in self.model.items()}
        saved = reader.tensors(
            snapshot.model,
            likes,
            differs_between_ranks=self.model_is_sharded,
        )
        for name, tensor in saved:
            likes[name].copy_(tensor)
        training = dict(
            reader.tensors(
                snapshot.training,
                self._needed_for_training(snapshot.training),
                differs_between_ranks=self.model_is_sharded or self.optimizer_is_sharded,
            )
        )
        generators = reader.generator_state(snapshot.training, _GENERATORS)
        reader.agree()
        self._apply(training)
        return generators is not None and self._set_generators(generators)

    def _needed_for_training(self, names: Iterable[str]) -> dict[str, Tensor | None]:
        """Returns the tensors of the optimizer and the objects that this rank needs, with their shards."""
        optimized = {
            id(parameter)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        objects = object_tensors(self.objects)
        needed: dict[str, Tensor | None] = {}
        for name in names:
            parameter = self.model.get(name.partition("/")[2])
            if not name.startswith(_OPTIMIZER):
                needed[name] = objects.get(name)
            elif parameter is not None and id(parameter) in optimized:
                needed[name] = parameter.detach()
        needed.pop(_GENERATORS, None)
        return needed

    def _apply(self, training: Tensors) -> None:
        """Restores the optimizers, the objects and the scaler."""
        states: dict[str, dict[str, Tensor]] = {}
        scaler: dict[str, Tensor] = {}
        for name, tensor in training.items():
            if name.startswith(_OPTIMIZER):
                key, _, parameter = name.removeprefix(_OPTIMIZER).partition("/")
                if parameter in self.model:
                    states.setdefault(parameter, {})[key] = tensor
            elif name.startswith(_SCALER):
                scaler[name.removeprefix(_SCALER)] = tensor
        for optimizer in self.optimizers:
            _load_optimizer(optimizer, self.model, states)
        load_objects(
            self.objects, {name: value for name, value in training.items() if name.startswith(PREFIX)}
        )
        if self.scaler is not None and scaler:
            self.scaler.load_state_dict(
                {**self.scaler.state_dict(), **{key: value.item() for key, value in scaler.items()}}
            )

    def _is_first(self, tensor: Tensor) -> bool:
        return is_first_copy(tensor, self.group.world.rank, self.at)

    def _stream(self, own: Tensors, is_written: Callable[[Tensor], bool]) -> Stream:
        """Returns the tensors that this rank writes: whole ones, or those shards for which `is_written`."""
        is_pinned = self.group.device.type == "cuda"
        if not self.is_sharded:
            return Stream(specs_of(own), ((name, whole_tensor(own[name])) for name in own), is_pinned)
        written = {name: value for name, value in own.items() if is_written(value)}
        shards = {name: local_shard(value) for name, value in written.items()}
        shards = {name: shard for name, shard in shards.items() if shard.numel() or not own[name].numel()}
        places = {name: place_of_shard(own[name]) for name in shards}
        return Stream(specs_of(shards), shards.items(), is_pinned, places)

    def _set_generators(self, state: Tensor) -> bool:
        try:
            set_generator_state(state.cpu(), self.group.device)
        except ValueError:
            return False
        return True


def plain_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group,
    scaler: torch.amp.GradScaler | None = None,
    at: Mapping[str, int] | None = None,
) -> TrainingState:
    """Returns the state of a model of which every rank holds all tensors, unsharded or as DTensors."""
    tensors = live_tensors(model)
    return TrainingState(
        group=group, model=tensors, optimizers=(optimizer,), whole=specs_of(tensors), scaler=scaler, at=at
    )


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers to be saved, by name, without copying them."""
    return dict(model.state_dict(keep_vars=True))


def optimizer_tensors(model: Tensors, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Returns the tensors of the optimizers as `optimizer.KEY/PARAMETER`, without copying them."""
    tensors = {}
    for optimizer in optimizers:
        seen = set()
        for name, parameter in model.items():
            if id(parameter) not in seen and parameter in optimizer.state:
                seen.add(id(parameter))  # a parameter with two names is optimized once
                for key, value in optimizer.state[parameter].items():
                    if isinstance(value, Tensor):
                        tensors[f"{_OPTIMIZER}{key}/{name}"] = value
    return tensors


def _load_optimizer(
    optimizer: torch.optim.Optimizer, model: Tensors, states: Mapping[str, dict[str, Tensor]]
) -> None:
    """Loads the state of each parameter; the options of the optimizer do not change."""
    if not states:
        return
    by_parameter = {id(model[name]): state for name, state in states.items()}
    parameters = [parameter for entry in optimizer.param_groups for parameter in entry["params"]]
    numbered = {
        i: by_parameter[id(parameter)]
        for i, parameter in enumerate(parameters)
        if id(parameter) in by_parameter
    }
    # load_state_dict moves each tensor, such as the step counts of a fused optimizer, to the required device.
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})


def _largest(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the largest absolute value of each tensor, or NaN if it contains a NaN.

    The tensors have the same device. No temporary tensors of their size are allocated.
    """
    if tensors[0].device.type != "cpu":
        return list(torch._foreach_norm(tensors, math.inf))  # one kernel for many tensors
    # On a CPU, torch needs about 80 times as long for the norm.
    return [torch.maximum(high, -low) for low, high in (tensor.aminmax() for tensor in tensors)]


def _scaler_tensors(scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
    return {
        f"{_SCALER}{key}": torch.tensor(value, dtype=torch.float64)
        for key, value in scaler.state_dict().items()
    }


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
