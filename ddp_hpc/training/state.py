"""What a training run is at a step boundary, as named tensors: out of the device, and back into it.

Names are those of the bare model: `encoder.layers.0.norm1.weight`, and
`optimizer.exp_avg/encoder.layers.0.norm1.weight`. Whatever the strategy, a snapshot holds each
tensor whole: one that is spread over ranks is put together on rank 0, which alone writes and
reads. So a run goes on with another strategy, or another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_hpc.errors import DataError
from ddp_hpc.training.group import Group
from ddp_hpc.training.random_state import generator_state, set_generator_state

Tensors: TypeAlias = Mapping[str, Tensor]
Specs: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

_OPTIMIZER = "optimizer."
_SCALER = "scaler."
_GENERATORS = "generators"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The live tensors of this rank's model and optimizer."""

    group: Group
    model: Tensors
    """What this rank holds of the model, by name: plain tensors, or DTensors of which it holds a part."""
    optimizer: torch.optim.Optimizer
    """The one whose state lies here: under ZeRO the local one."""
    whole: Specs
    """Shape and type of each tensor of the whole model, whichever rank holds it."""
    scaler: torch.amp.GradScaler | None = None
    model_is_spread: bool = False
    """Other ranks hold other tensors: stages of a pipeline."""
    optimizer_is_spread: bool = False
    """Other ranks hold the state of other parameters."""
    leads: bool = True
    """Of the ranks that hold the same tensors, this one hands them over."""

    def model_tensors(self) -> dict[str, Tensor]:
        """The whole model on rank 0; live where nothing is spread. Collective: every rank must call this."""
        own = {name: self._whole(value.detach()) for name, value in self.model.items()}
        return self._collect(own) if self.model_is_spread else own

    def training_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state and the random numbers' on rank 0. Collective: every rank must call this."""
        own = {
            name: self._whole(value) for name, value in optimizer_tensors(self.model, self.optimizer).items()
        }
        tensors = self._collect(own) if self.optimizer_is_spread else own
        if self.scaler is not None:
            tensors |= _scaler_tensors(self.scaler)
        return {**tensors, _GENERATORS: self.group.gather(self._generators()).cpu()}

    def check(self, saved: Tensors, where: str) -> None:
        """Raises DataError unless the tensors are those of this model."""
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
            f"{where}: is of another model: {name} is {seen} there and {needed} here; "
            "give the options it was made with, or name another --snapshot-dir"
        )

    def restore(self, saved_model: Tensors | None, saved_training: Tensors | None) -> bool:
        """Puts what rank 0 has read into every rank. Collective: every rank must call this.

        The tensors are None on the other ranks. False: the generators are not as they were, as
        they were those of another number of ranks or another kind of device.
        """
        for name, tensor in self._spread(saved_model):
            if name in self.model:
                self.model[name].detach().copy_(_like(self.model[name], tensor))
        states: dict[str, dict[str, Tensor]] = {}
        scaler: dict[str, Tensor] = {}
        exact = False
        for name, tensor in self._spread(saved_training):
            if name.startswith(_OPTIMIZER):
                key, _, parameter = name.removeprefix(_OPTIMIZER).partition("/")
                if parameter in self.model:
                    states.setdefault(parameter, {})[key] = _like(self.model[parameter], tensor)
            elif name.startswith(_SCALER):
                scaler[name.removeprefix(_SCALER)] = tensor
            elif name == _GENERATORS:
                exact = self._set_generators(tensor)
        _load_optimizer(self.optimizer, self.model, states)
        if self.scaler is not None and scaler:
            self.scaler.load_state_dict(
                {**self.scaler.state_dict(), **{key: value.item() for key, value in scaler.items()}}
            )
        return exact

    def _whole(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or the whole of one that is spread, in host memory, where this rank leads."""
        if not is_spread(tensor):
            return tensor
        whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]  # a DTensor's
        return whole.cpu() if self.leads else whole.new_empty(0)

    def _collect(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """All ranks' tensors on rank 0, one after another; nothing elsewhere. Collective."""
        group = self.group
        rank = group.world.rank
        held = own if self.leads else {}
        specs = group.comm.allgather(_listed(held))
        found = dict(held) if rank == 0 else {}
        for owner, entries in enumerate(specs):
            for name, dtype, shape in entries if owner else []:
                if rank == owner:
                    dist.send(held[name].to(group.device).contiguous(), dst=0)
                elif rank == 0:
                    tensor = _room(dtype, shape, group.device)
                    dist.recv(tensor, src=owner)
                    found[name] = tensor.cpu()
        return found

    def _spread(self, tensors: Tensors | None) -> Iterator[tuple[str, Tensor]]:
        """Rank 0's tensors on every rank's device, one after another. Collective."""
        device = self.group.device
        for name, dtype, shape in self.group.comm.bcast(_listed(tensors or {})):
            tensor = _room(dtype, shape, device) if tensors is None else tensors[name].to(device)
            if self.group.backend != "none":
                dist.broadcast(tensor, src=0)
            yield name, tensor

    def _generators(self) -> Tensor:
        return generator_state(self.group.device).to(self.group.device)

    def _set_generators(self, every_rank: Tensor) -> bool:
        if len(every_rank) != self.group.world.world_size:
            return False
        try:
            set_generator_state(every_rank[self.group.world.rank].cpu(), self.group.device)
        except ValueError:
            return False
        return True


def plain_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group,
    scaler: torch.amp.GradScaler | None = None,
) -> TrainingState:
    """The state of a model that each rank holds, or a part of each of its tensors."""
    tensors = live_tensors(model)
    return TrainingState(
        group=group, model=tensors, optimizer=optimizer, whole=specs_of(tensors), scaler=scaler
    )


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and buffers that are saved, the very ones, by name."""
    return dict(model.state_dict(keep_vars=True))


def specs_of(tensors: Tensors) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each, of the whole where it is spread."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def optimizer_tensors(model: Tensors, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's own tensors, as `optimizer.KEY/PARAMETER`. They are the optimizer's, not copies."""
    found = {}
    seen = set()
    for name, parameter in model.items():
        if id(parameter) not in seen and parameter in optimizer.state:
            seen.add(id(parameter))  # one that a model has under two names is optimized once
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    found[f"{_OPTIMIZER}{key}/{name}"] = value
    return found


def is_spread(tensor: Tensor) -> bool:
    """Whether it is a DTensor, of which this rank holds a part."""
    return hasattr(tensor, "full_tensor")


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """The part of `value` that belongs beside this rank's part of the parameter; a count stays as it is."""
    if not is_spread(parameter) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # All ranks have the whole: each takes its part, and nothing is sent.
    return distribute_tensor(
        value.detach(),
        parameter.device_mesh,  # type: ignore[attr-defined]  # a DTensor's
        parameter.placements,  # type: ignore[attr-defined]
        src_data_rank=None,
    )


def _load_optimizer(
    optimizer: torch.optim.Optimizer, model: Tensors, states: Mapping[str, dict[str, Tensor]]
) -> None:
    """Gives each parameter its state; the optimizer's options stay what they are."""
    if not states:
        return
    by_parameter = {id(model[name]): state for name, state in states.items()}
    parameters = [parameter for entry in optimizer.param_groups for parameter in entry["params"]]
    numbered = {
        i: by_parameter[id(parameter)]
        for i, parameter in enumerate(parameters)
        if id(parameter) in by_parameter
    }
    # It moves each tensor where this optimizer wants it, as the steps of a fused one on the GPU.
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})


def _scaler_tensors(scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
    return {
        f"{_SCALER}{key}": torch.tensor(value, dtype=torch.float64)
        for key, value in scaler.state_dict().items()
    }


def _listed(tensors: Tensors) -> list[list[Any]]:
    """Name, type and shape of each, as JSON can tell them."""
    return [[name, _dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]


def _room(dtype: str, shape: list[int], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
