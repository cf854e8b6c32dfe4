"""How the bytes of tensors were computed, so that the same operations can compute them again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

SMALLEST_BYTES = 2**18
"""Smaller tensors always stay in memory: their recorded operations would save little, since each state of a
random number generator takes 5 KiB."""
# The most operations that are repeated to compute a tensor; tensors that need more stay in memory.
_MOST_OPERATIONS = 100

_aten = torch.ops.aten
_FILLING = {
    _aten.uniform_, _aten.normal_, _aten.zero_, _aten.fill_, _aten.copy_, _aten.random_, _aten.bernoulli_,
    _aten.exponential_, _aten.log_normal_, _aten.cauchy_, _aten.geometric_,
}  # fmt: skip
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}


class NotReproducibleError(Exception):
    """The recorded operations do not compute the values that a tensor had."""


@dataclass(frozen=True)
class View:
    """A tensor in the memory that `version` describes, or, if it is None, to which the operation writes."""

    version: Version | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Returns this tensor in other memory."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, eq=False)
class Version:
    """How the bytes of a tensor's memory are computed: by one operation, and those before it."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    """The arguments, with a View in place of each large tensor."""
    generator: Tensor | None
    """The state of the random number generator before the operation."""
    output: int | None
    """Which output of the operation has this memory; None if the operation writes to existing memory."""
    previous: Version | None
    """The bytes before the operation, unless it replaces all of them."""
    num_bytes: int
    num_operations: int
    digest: str
    """A checksum of all operations, for a comparison between ranks."""

    def compute(self) -> torch.UntypedStorage:
        """Returns new memory with the bytes of this version."""
        versions, version = [self], self.previous
        while version is not None:
            versions.append(version)
            version = version.previous
        storage = None
        for version in reversed(versions):
            storage = version._apply(storage)
        assert storage is not None
        return storage

    def _apply(self, storage: torch.UntypedStorage | None) -> torch.UntypedStorage:
        if storage is None and self.output is None:
            storage = _memory_of(self.num_bytes)

        def decoded(value: Any) -> Any:
            if not isinstance(value, View):
                return value
            memory = storage if value.version is None else value.version.compute()
            assert memory is not None
            return value.of(memory)

        args, kwargs = tree_map(decoded, (self.args, dict(self.kwargs)))
        with ExitStack() as stack:
            if self.generator is not None and kwargs.get("generator") is not None:
                kwargs["generator"] = torch.Generator().set_state(self.generator)
            elif self.generator is not None:
                stack.enter_context(torch.random.fork_rng(devices=[]))
                torch.set_rng_state(self.generator)
            outputs = execute(self.operation, args, kwargs)
        if storage is not None:
            return storage
        assert self.output is not None
        output: Tensor = tree_leaves(outputs)[self.output]
        return output.untyped_storage()


@dataclass(frozen=True)
class Recipe:
    """How the values of one tensor are obtained: they are in memory, or the operations are repeated."""

    dtype: torch.dtype
    kept: Tensor | None = None
    view: View | None = None
    checksum: int = 0
    digest: str = ""

    def values(self) -> Tensor:
        """Returns the values on the CPU. Do not change them.

        Raises:
            NotReproducibleError: the factory changed the tensor in a way that was not recorded.
        """
        if self.view is None or self.view.version is None:
            assert self.kept is not None
            return self.kept
        with torch.no_grad():
            storage = self.view.version.compute()
        if checksum_of(storage) != self.checksum:
            raise NotReproducibleError
        return self.view.of(storage)


@dataclass(frozen=True)
class Call:
    """An operation that was executed, and the versions of its inputs before it."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator: Tensor | None
    versions: Mapping[int, Version | None]

    def version_of(self, tensor: Tensor, key: int, replaces: bool) -> Version | None:
        """Returns the version of a tensor that the operation has written to; None if it is not known."""
        previous = None if replaces else self.versions.get(key)
        return None if previous is None and not replaces else self._version(tensor, key, None, previous)

    def version_of_output(self, tensor: Tensor, number: int) -> Version | None:
        """Returns the version of a new tensor; None if it is not known."""
        return self._version(tensor, None, number, None)

    def _version(
        self, tensor: Tensor, key: int | None, output: int | None, previous: Version | None
    ) -> Version | None:
        num_operations, digest = 1, hashlib.sha256(f"{self.operation} {output}".encode())
        if self.generator is not None:
            digest.update(self.generator.numpy().tobytes())

        def encoded(value: Any) -> Any:
            nonlocal num_operations
            if isinstance(value, Tensor) and key is not None and has_memory(value) and key_of(value) == key:
                value = view_of(value, None)
            elif is_large(value):
                version = self.versions.get(key_of(value))
                if version is None:
                    raise _UnknownError
                num_operations += version.num_operations
                digest.update(version.digest.encode())
                value = view_of(value, version)
            elif isinstance(value, Tensor):
                if not has_memory(value):
                    raise _UnknownError
                value = value.detach().clone()
                digest.update(digest_of(value).encode())
                return value
            shown = replace(value, version=None) if isinstance(value, View) else value
            digest.update(b"generator" if isinstance(value, torch.Generator) else repr(shown).encode())
            return value

        try:
            args = tree_map(encoded, self.args)
            kwargs = {name: tree_map(encoded, value) for name, value in self.kwargs.items()}
        except _UnknownError:
            return None
        if previous is not None:
            num_operations += previous.num_operations
            digest.update(previous.digest.encode())
        num_bytes = tensor.untyped_storage().nbytes()
        is_resized = previous is not None and previous.num_bytes != num_bytes
        if num_operations > _MOST_OPERATIONS or is_resized:
            return None
        return Version(
            self.operation, args, kwargs, self.generator, output, previous, num_bytes, num_operations,
            digest.hexdigest(),
        )  # fmt: skip


class _UnknownError(Exception):
    """An argument has values that cannot be computed again."""


def execute(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Executes an operation. Uninitialized memory is set to zero, so that it can be computed again."""
    outputs = operation(*args, **kwargs)
    if operation.overloadpacket in _EMPTY and is_large(outputs):
        outputs.zero_()
    return outputs


def has_memory(value: Any) -> bool:
    """Returns whether it is an ordinary tensor on the CPU."""
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, nn.Parameter, nn.Buffer)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not is_lazy(value)
    )


def is_large(value: Any) -> bool:
    """Returns whether operations on a tensor are recorded."""
    if not has_memory(value):
        return False
    # The memory of a freed tensor has no bytes, but its shape is known.
    return bool(max(value.untyped_storage().nbytes(), value.numel() * value.itemsize) >= SMALLEST_BYTES)


def large_tensors(values: Any) -> list[Tensor]:
    """Returns the large tensors in a structure of arguments."""
    return [value for value in tree_leaves(values) if is_large(value)]


def key_of(tensor: Tensor) -> int:
    """Returns a number that identifies the memory of a tensor."""
    return int(tensor.untyped_storage()._cdata)


def _memory_of(num_bytes: int) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()


def view_of(tensor: Tensor, version: Version | None) -> View:
    """Returns the place of a tensor in its memory."""
    size, offset = tuple(map(int, tensor.shape)), int(tensor.storage_offset())
    return View(version, tensor.dtype, size, tensor.stride(), offset)


def written_tensors(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments that the operation writes to."""
    return [
        args[number] if number < len(args) else kwargs.get(argument.name)
        for number, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def replaces_all(operation: Any, tensor: Tensor) -> bool:
    """Returns whether the operation replaces all values in the memory of the tensor that it writes to."""
    covers = tensor.numel() * tensor.itemsize >= tensor.untyped_storage().nbytes() and tensor.is_contiguous()
    return operation.overloadpacket in _FILLING and covers


def checksum_of(storage: torch.UntypedStorage) -> int:
    """Returns a number that depends on all bytes, faster than a cryptographic checksum."""
    values = torch.empty(0, dtype=torch.uint8).set_(storage)
    whole = len(values) // 8 * 8
    return int(values[:whole].view(torch.int64).sum()) + int(values[whole:].sum())


def digest_of(tensor: Tensor) -> str:
    """Returns a checksum of a tensor's values, type and shape."""
    if not has_memory(tensor) or tensor.is_neg() or tensor.is_conj():
        return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.device.type}"
    content = tensor.contiguous().view(-1).view(torch.uint8)
    if tensor.nbytes >= SMALLEST_BYTES:
        total = checksum_of(content.clone().untyped_storage())
        return f"{tensor.dtype} {tuple(tensor.shape)} {total}"
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content.numpy().tobytes()).hexdigest()}"
