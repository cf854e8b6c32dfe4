"""Converts the `state_dict()` of any object to named tensors and JSON, and back.

A snapshot cannot contain code, so values are limited to tensors, arrays, numbers, strings, bytes, and
containers of these. The JSON text is itself a tensor of bytes, `object.scheduler`; the tensors of the state
are `object.scheduler/0` and so on.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ddp_hpc.base.errors import RequestError
from ddp_hpc.training.snapshots.dtensor_shards import shard_like
from ddp_hpc.training.snapshots.host_buffer import DTYPES

PREFIX = "object."
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class Stateful(Protocol):
    """An object with a state, such as a learning rate scheduler or a GradScaler."""

    def state_dict(self) -> Any:
        """Returns the state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restores a state that `state_dict` has returned."""


def object_tensors(objects: Mapping[str, Stateful]) -> dict[str, Tensor]:
    """Returns the states of the objects as named tensors, without copying their tensors.

    Raises:
        RequestError: a state contains a value that a snapshot cannot contain.
    """
    named: dict[str, Tensor] = {}
    for name, stateful in objects.items():
        tensors: list[Tensor] = []
        text = json.dumps(_encoded(stateful.state_dict(), tensors, name))
        named[f"{PREFIX}{name}"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        named |= {f"{PREFIX}{name}/{number}": tensor for number, tensor in enumerate(tensors)}
    return named


def object_names(saved: Iterable[str]) -> set[str]:
    """Returns the names of the objects whose states are among the tensors with these names."""
    return {name.removeprefix(PREFIX) for name in saved if name.startswith(PREFIX) and "/" not in name}


def load_objects(objects: Mapping[str, Stateful], saved: Mapping[str, Tensor]) -> None:
    """Restores the states of the objects from the tensors that `object_tensors` has returned."""
    for name, stateful in objects.items():
        if (text := saved.get(f"{PREFIX}{name}")) is not None:
            encoded = json.loads(bytes(text.cpu().numpy()))
            begin = f"{PREFIX}{name}/"
            tensors = {
                key.removeprefix(begin): value for key, value in saved.items() if key.startswith(begin)
            }
            stateful.load_state_dict(_decoded(encoded, tensors, stateful.state_dict()))


def _encoded(value: Any, tensors: list[Tensor], where: str) -> Any:
    """Returns the value as JSON, in which a tensor is replaced by its number in `tensors`."""
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, Tensor) and value.dtype in DTYPES and value.layout is torch.strided:
        tensors.append(value.detach())
        return {"tensor": str(len(tensors) - 1)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {kind: [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        entries = [[_encoded(key, tensors, where), key, value[key]] for key in value]
        return {"dict": [[key, _encoded(item, tensors, f"{where}[{name!r}]")] for key, name, item in entries]}
    for kind, of_kind in _CONTAINERS.items():
        if isinstance(value, of_kind):
            return {kind: [_encoded(item, tensors, f"{where}[{at}]") for at, item in enumerate(value)]}
    seen = value.dtype if isinstance(value, Tensor) else type(value).__name__
    raise RequestError(
        f"the state of {where} has the type {seen}, which a snapshot cannot contain; state_dict() must "
        f"return only dense tensors, arrays, numbers, strings, and dicts or lists of these"
    )


def _decoded(value: Any, tensors: Mapping[str, Tensor], current: Any) -> Any:
    """Converts JSON back to a value. `current` is the current value, which determines the types."""
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "tensor":
        tensor = tensors[content]
        return shard_like(current, tensor.to(current.device)) if isinstance(current, Tensor) else tensor.cpu()
    if kind in ("array", "number"):
        dtype, shape, text = content
        array = np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
        return array if kind == "array" else array[()]
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dict":
        pairs = [(_decoded(key, tensors, None), item) for key, item in content]
        before = current if isinstance(current, Mapping) else {}
        return _like_mapping(before, {key: _decoded(item, tensors, before.get(key)) for key, item in pairs})
    items = current if isinstance(current, list | tuple) else []
    known = [*items, *([None] * len(content))]
    values = [_decoded(item, tensors, old) for item, old in zip(content, known, strict=False)]
    return type(current)(*values) if hasattr(current, "_fields") else _CONTAINERS[kind](values)


def _like_mapping(current: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Returns a mapping of the same type, such as a Counter, or a dict."""
    if type(current) is dict or not isinstance(current, dict):
        return values
    result = copy.copy(current)
    result.clear()
    result.update(values)
    return result
