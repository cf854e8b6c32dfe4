"""Reads the state of a training run between two steps as named tensors, and restores it.

Names are those of the bare model: `encoder.layers.0.norm1.weight`, and
`optimizer.exp_avg/encoder.layers.0.norm1.weight`. A snapshot contains each tensor unsharded,
regardless of the strategy: a tensor that is sharded over ranks is gathered on rank 0, which writes
and reads it. So a run can resume with another strategy, or another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_hpc.errors import DataError
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.snapshots.host_buffer import Specs, Stream, Tensors, specs_of
from ddp_hpc.training.snapshots.object_states import (
    PREFIX,
    Stateful,
    load_objects,
    object_names,
    object_tensors,
)
from ddp_hpc.training.snapshots.random_state import generator_state, set_generator_state
from ddp_hpc.training.snapshots.sharded_tensors import local_shard, shard_like, whole_tensor

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
    """Whether ranks hold the optimizer state of different parameters."""
    leads: bool = True
    """Whether this rank sends its tensors to rank 0. If several ranks have the same tensors, only one of them
    sends them."""
    objects: Mapping[str, Stateful] = field(default_factory=dict)
    """More objects with a state, by name. Rank 0's state is saved. A name that starts with an underscore may
    be missing in a snapshot."""

    @property
    def optimizer_names(self) -> str:
        """The types of the optimizers, such as `Adam`."""
        return ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    def model_tensors(self) -> Stream:
        """Returns the whole model on rank 0: the tensors themselves, not copies, if nothing is sharded.

        Collective, including the iteration: every rank must call this and iterate over all tensors.
        """
        return self._stream(
            {name: value.detach() for name, value in self.model.items()}, self.model_is_sharded
        )

    def training_tensors(self) -> Stream:
        """Returns the state of the optimizer and of all ranks' random number generators on rank 0.

        Collective, like `model_tensors`.
        """
        own = optimizer_tensors(self.model, self.optimizers) | object_tensors(self.objects)
        stream = self._stream(own, self.optimizer_is_sharded)
        more = {} if self.scaler is None else _scaler_tensors(self.scaler)
        device = self.group.device
        if (states := self.group.gather_on_rank_0(generator_state(device).to(device))) is not None:
            more[_GENERATORS] = states.cpu()
        return replace(
            stream, specs={**stream.specs, **specs_of(more)}, tensors=chain(stream.tensors, more.items())
        )

    def non_finite(self) -> tuple[str, int] | None:
        """Returns the first non-finite trained parameter and the rank that has it; None if all are finite.

        Buffers and frozen parameters are not checked: masks contain infinities. Waits for the device.
        Collective: every rank must call this.
        """
        device, found = self.group.device, torch.zeros((), dtype=torch.int64)
        shards = {
            name: shard
            for name, value in self.model.items()
            if value.requires_grad
            and value.is_floating_point()
            and (shard := local_shard(value.detach())).numel()
        }
        if shards:
            # aminmax needs no temporary tensor of the size of the parameter.
            ends = [end.isfinite().to(device) for shard in shards.values() for end in shard.aminmax()]
            is_bad = ~torch.stack(ends).view(-1, 2).all(dim=1)
            found = torch.where(is_bad.any(), is_bad.int().argmax() + 1, 0)
        of_ranks = self.group.gather(found.to(device)).tolist()
        rank = next((rank for rank, number in enumerate(of_ranks) if number), None)
        if rank is None:
            return None
        own = list(shards)[of_ranks[self.group.world.rank] - 1] if of_ranks[self.group.world.rank] else ""
        return self.group.comm.allgather(own)[rank], rank

    def check(self, saved: Tensors, where: str) -> None:
        """Raises DataError if the tensors do not match this model."""
        theirs = specs_of(saved)
        if theirs == self.whole:
            return
        names = sorted({**self.whole, **theirs})
        name = next(name for name in names if self.whole.get(name) != theirs.get(name))
        seen, needed = (
            f"{found[name][0]} {_dtype_name(found[name][1])}" if name in found else "absent"
            for found in (theirs, self.whole)
        )
        raise DataError(
            f"the snapshot {where} is from a different model: {name} is {seen} in the snapshot, {needed} in "
            "the model. Use the original options, or another --snapshot-dir"
        )

    def check_objects(self, saved: Tensors, where: str) -> None:
        """Raises DataError if the tensors are from a run with other objects."""
        theirs, ours = (
            ", ".join(sorted(name for name in names if not name.startswith("_"))) or "none"
            for names in (object_names(saved), set(self.objects))
        )
        if theirs != ours:
            raise DataError(
                f"the snapshot {where} contains the state of other objects: {theirs}, not {ours}. Use the "
                "same objects as before, or another --snapshot-dir"
            )

    def restore(self, saved_model: Tensors | None, saved_training: Tensors | None) -> bool:
        """Restores the tensors that rank 0 has read, on every rank. Collective: every rank must call this.

        The tensors are None on the other ranks. Returns False if the random number generators could not be
        restored, because the number of ranks or the kind of device has changed.
        """
        for name, tensor in self._broadcast(saved_model):
            if name in self.model:
                self.model[name].detach().copy_(shard_like(self.model[name], tensor))
        states: dict[str, dict[str, Tensor]] = {}
        scaler: dict[str, Tensor] = {}
        objects: dict[str, Tensor] = {}
        exact = False
        for name, tensor in self._broadcast(saved_training):
            if name.startswith(_OPTIMIZER):
                key, _, parameter = name.removeprefix(_OPTIMIZER).partition("/")
                if parameter in self.model:
                    states.setdefault(parameter, {})[key] = shard_like(self.model[parameter], tensor)
            elif name.startswith(PREFIX):
                objects[name] = tensor
            elif name.startswith(_SCALER):
                scaler[name.removeprefix(_SCALER)] = tensor
            elif name == _GENERATORS:
                exact = self._set_generators(tensor)
        for optimizer in self.optimizers:
            _load_optimizer(optimizer, self.model, states)
        load_objects(self.objects, objects)
        if self.scaler is not None and scaler:
            self.scaler.load_state_dict(
                {**self.scaler.state_dict(), **{key: value.item() for key, value in scaler.items()}}
            )
        return exact

    def _stream(self, own: Tensors, is_distributed: bool) -> Stream:
        is_pinned = self.group.device.type == "cuda"
        if not is_distributed:
            return Stream(specs_of(own), ((name, whole_tensor(own[name])) for name in own), is_pinned)
        entries = self.group.comm.allgather(_describe(own if self.leads else {}))
        specs = {
            name: (tuple(shape), getattr(torch, dtype))
            for of_rank in entries
            for name, dtype, shape in of_rank
        }
        return Stream(specs, self._gathered(own, entries), is_pinned)

    def _gathered(self, own: Tensors, entries: list[list[list[Any]]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of all ranks on rank 0, and nothing on the others. Collective."""
        device, rank = self.group.device, self.group.world.rank
        for name in own:
            tensor = whole_tensor(own[name])
            if rank == 0:
                yield name, tensor
            elif self.leads:
                dist.send(tensor.to(device).contiguous(), dst=0)
        if rank == 0:
            for owner, of_rank in enumerate(entries):
                for name, dtype, shape in of_rank if owner else []:
                    tensor = _empty(dtype, shape, device)
                    dist.recv(tensor, src=owner)
                    yield name, tensor

    def _broadcast(self, tensors: Tensors | None) -> Iterator[tuple[str, Tensor]]:
        """Yields rank 0's tensors on every rank, on its device; of the generators, the rank's own row.

        Collective.
        """
        device, world_size = self.group.device, self.group.world.world_size
        for name, dtype, shape in self.group.comm.bcast(_describe(tensors or {})):
            if name == _GENERATORS:
                if shape[0] == world_size:
                    own = _empty(dtype, shape[1:], device)
                    yield name, self.group.scatter(None if tensors is None else tensors[name], own)
                continue
            tensor = _empty(dtype, shape, device) if tensors is None else tensors[name].to(device)
            if self.group.backend != "none":
                dist.broadcast(tensor, src=0)
            yield name, tensor

    def _set_generators(self, own: Tensor) -> bool:
        try:
            set_generator_state(own.cpu(), self.group.device)
        except ValueError:
            return False
        return True


def plain_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group,
    scaler: torch.amp.GradScaler | None = None,
) -> TrainingState:
    """Returns the state of a model of which every rank holds all tensors, unsharded or as DTensors."""
    tensors = live_tensors(model)
    return TrainingState(
        group=group, model=tensors, optimizers=(optimizer,), whole=specs_of(tensors), scaler=scaler
    )


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers to be saved, by name, without copying them."""
    return dict(model.state_dict(keep_vars=True))


def optimizer_tensors(model: Tensors, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Returns the tensors of the optimizers as `optimizer.KEY/PARAMETER`, without copying them."""
    found = {}
    for optimizer in optimizers:
        seen = set()
        for name, parameter in model.items():
            if id(parameter) not in seen and parameter in optimizer.state:
                seen.add(id(parameter))  # a parameter with two names is optimized once
                for key, value in optimizer.state[parameter].items():
                    if isinstance(value, Tensor):
                        found[f"{_OPTIMIZER}{key}/{name}"] = value
    return found


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


def _scaler_tensors(scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
    return {
        f"{_SCALER}{key}": torch.tensor(value, dtype=torch.float64)
        for key, value in scaler.state_dict().items()
    }


def _describe(tensors: Tensors) -> list[list[Any]]:
    """Returns name, type and shape of each tensor as JSON values."""
    return [[name, _dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]


def _empty(dtype: str, shape: list[int], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
