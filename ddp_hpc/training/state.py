"""What a training run is at a step boundary, as named tensors: out of the device, and back into it.

Names are those of the bare model: `encoder.layers.0.norm1.weight`, and
`optimizer.exp_avg/encoder.layers.0.norm1.weight`. Under DDP all ranks hold the same, so rank 0
alone writes and reads, and hands it to the others over the process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_hpc.errors import DataError
from ddp_hpc.training.group import Group
from ddp_hpc.training.random_state import generator_state, set_generator_state

_OPTIMIZER = "optimizer."
_GENERATORS = "generators"


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's own tensors, as `optimizer.KEY/PARAMETER`. They are the optimizer's, not copies."""
    return {
        f"{_OPTIMIZER}{key}/{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def all_generators(group: Group) -> dict[str, Tensor]:
    """Every rank's generators: one tensor (world_size, bytes), uint8. Collective."""
    return {_GENERATORS: group.gather(generator_state(group.device).to(group.device)).cpu()}


def check_model(model: nn.Module, saved: Mapping[str, Tensor], where: str) -> None:
    """Raises DataError unless the tensors are those of this model."""
    own = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()}
    theirs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in saved.items()}
    if own == theirs:
        return
    name = next(name for name in sorted({**own, **theirs}) if own.get(name) != theirs.get(name))
    seen, needed = (
        f"{found[name][0]} {str(found[name][1]).removeprefix('torch.')}" if name in found else "absent"
        for found in (theirs, own)
    )
    raise DataError(
        f"{where}: is of another model: {name} is {seen} there and {needed} here; "
        "give the options it was made with, or name another --snapshot-dir"
    )


def restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group,
    saved_model: Mapping[str, Tensor] | None,
    saved_training: Mapping[str, Tensor] | None,
) -> bool:
    """Puts what rank 0 has read into every rank. Collective: every rank must call this.

    The tensors are None on the other ranks. False: the generators are not as they were, as
    they were those of another number of ranks or another kind of device.
    """
    own = model.state_dict()
    for name, tensor in own.items():
        if saved_model is not None:
            tensor.copy_(saved_model[name])
        _broadcast(tensor, group)
    training = dict(_spread(saved_training, group))
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in training.items():
        if name.startswith(_OPTIMIZER):
            key, _, parameter = name.removeprefix(_OPTIMIZER).partition("/")
            states.setdefault(parameter, {})[key] = tensor
    if states:
        numbered = {i: states[name] for i, (name, _) in enumerate(model.named_parameters()) if name in states}
        # It moves each tensor where this optimizer wants it, as the steps of a fused one on the GPU.
        optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})
    generators = training[_GENERATORS]
    if len(generators) != group.world.world_size:
        return False
    try:
        set_generator_state(generators[group.world.rank].cpu(), group.device)
    except ValueError:
        return False
    return True


def _spread(tensors: Mapping[str, Tensor] | None, group: Group) -> list[tuple[str, Tensor]]:
    """Rank 0's tensors on every rank's device. Collective: every rank must call this."""
    specs: list[Any] = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in (tensors or {}).items()
    ]
    found = []
    for name, dtype, shape in group.comm.bcast(specs):
        if tensors is not None:
            tensor = tensors[name].to(group.device)
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
        _broadcast(tensor, group)
        found.append((name, tensor))
    return found


def _broadcast(tensor: Tensor, group: Group) -> None:
    if group.backend != "none":
        dist.broadcast(tensor, src=0)
