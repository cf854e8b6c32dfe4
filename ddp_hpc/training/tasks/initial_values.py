"""Models on the meta device, which have shapes but no memory, and the initial values of their tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ddp_hpc.training.input.host_memory import return_free_memory
from ddp_hpc.training.tasks.recorded_init import RESIDENT_BYTES, Recorder
from ddp_hpc.training.tasks.recorded_operations import NotReproducibleError, Recipe


@dataclass(eq=False)
class InitialValues:
    """Computes the initial values of a model on the meta device, one tensor at a time."""

    recipes: dict[str, Recipe]
    """The recipes by name of the parameter or buffer. A tensor with two names has two recipes."""
    rebuild: Callable[[], nn.Module]
    """Creates the model with all values in memory."""
    say: Callable[[str], None]
    _whole: dict[str, Tensor] | None = field(default=None, init=False)
    _computed_bytes: int = field(default=0, init=False)

    @property
    def digest(self) -> str:
        """A checksum of the names and of everything that determines the values."""
        lines = (f"{name} {recipe.digest}\n" for name, recipe in self.recipes.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def values(self, name: str) -> Tensor:
        """Returns the values of a tensor on the CPU. Do not change them."""
        if self._computed_bytes > RESIDENT_BYTES:
            self._computed_bytes = 0
            return_free_memory()
        if self._whole is None:
            try:
                values = self.recipes[name].values()
                self._computed_bytes += values.nbytes
                return values
            except NotReproducibleError:
                self.say(
                    f"note: the factory set {name} in a way that cannot be reproduced, so "
                    "this rank creates the whole model in memory"
                )
                self._whole = named_tensors(self.rebuild())
        return self._whole[name].detach()

    def release(self) -> None:
        """Releases the values that are in memory, after the model has been filled."""
        self.recipes.clear()
        self._whole = None
        return_free_memory()


def without_memory(
    model: nn.Module, recorder: Recorder, rebuild: Callable[[], nn.Module], say: Callable[[str], None]
) -> InitialValues:
    """Moves a model that `recorder` has recorded to the meta device, and returns its initial values."""
    initial = InitialValues(recorder.recipes(named_tensors(model)), rebuild, say)
    convert(model, _on_meta)
    return initial


def with_memory(model: nn.Module, initial: InitialValues) -> None:
    """Moves a whole model from the meta device to the CPU, and computes its initial values."""
    convert(model, lambda tensor: torch.empty_like(tensor, device="cpu"))
    done = set[int]()
    for name, tensor in named_tensors(model).items():
        if id(tensor) not in done:
            tensor.detach().copy_(initial.values(name))
            done.add(id(tensor))
    initial.release()


def release_others(model: nn.Module, own: nn.Module) -> None:
    """Releases the memory of all parameters and buffers that are not in `own`, a part of the model."""
    kept = {id(tensor) for tensor in named_tensors(own).values()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in kept:
                module._parameters[name] = nn.Parameter(_on_meta(parameter), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in kept:
                module._buffers[name] = _on_meta(buffer)


def convert(model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Applies `function` to all parameters, which stay the same objects, and to all buffers."""
    done: dict[int, Tensor] = {}
    originals: list[Tensor] = []  # so that no other tensor gets the same id

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:
            originals.append(tensor)
            converted = function(tensor)
            done[id(tensor)] = tensor if isinstance(tensor, nn.Parameter) else converted
            return converted
        return done[id(tensor)]

    # Without this option, torch 2.13 creates a new parameter for each name of a tied parameter.
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(once)  # type: ignore[no-untyped-call]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns all parameters and buffers, persistent or not. Tied tensors have several names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")
