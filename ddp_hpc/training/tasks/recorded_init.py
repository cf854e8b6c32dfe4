"""Creates a model that is larger than the memory of the host, with the values that its factory usually gives.

While a factory runs, every operation is executed as usual, so the values and the state of the random number
generators are those of a plain call. The operations on large tensors are recorded, too. When the parameters
and buffers of the modules exceed a limit, the memory of those that were used least recently is freed. If the
factory uses them again, or when they are needed later, the recorded operations are repeated to restore their
values. torchdistx (https://pytorch.org/torchdistx/latest/deferred_init.html) records operations in a similar
way, but executes none of them until the factory has returned.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ddp_hpc.training.input.host_memory import return_free_memory

RESIDENT_BYTES = 2**26
"""The largest total size of the parameters and buffers that stay in memory while the factory runs. The one
that was used last stays in memory even if it is larger."""
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
# Functions that give Python code, or code of other libraries, access to the memory of a tensor.
_OPAQUE = {
    "__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "_typed_storage", "data_ptr", "numpy", "set_",
    "share_memory_", "storage", "tolist", "untyped_storage",
}  # fmt: skip


class NotReproducibleError(Exception):
    """The recorded operations do not compute the values that a tensor had."""


@dataclass(frozen=True)
class _View:
    """A tensor in the memory that `version` describes, or, if it is None, to which the operation writes."""

    version: _Version | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, eq=False)
class _Version:
    """How the bytes of a tensor's memory are computed: by one operation, and those before it."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    """The arguments, with a _View in place of each large tensor."""
    generator: Tensor | None
    """The state of the random number generator before the operation."""
    output: int | None
    """Which output of the operation has this memory; None if the operation writes to existing memory."""
    previous: _Version | None
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
            if not isinstance(value, _View):
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
            outputs = _execute(self.operation, args, kwargs)
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
    view: _View | None = None
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
        if _checksum(storage) != self.checksum:
            raise NotReproducibleError
        return self.view.of(storage)


class _Memory:
    """What is known about the memory of one tensor, and of all tensors that share it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # As long as this reference exists, no other storage has the same address.
        self._pointer = storage._weak_ref()
        self.version: _Version | None = None
        self.is_registered = False
        self.is_freed = False
        self.checksum = 0

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._pointer)  # type: ignore[no-untyped-call]

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The memory itself; None if no tensor uses it anymore."""
        return torch.UntypedStorage._new_with_weak_ptr(self._pointer)

    def free(self, storage: torch.UntypedStorage) -> None:
        assert self.version is not None
        self.checksum = _checksum(storage)
        storage.resize_(0)
        self.is_freed = True

    def restore(self, storage: torch.UntypedStorage, *, with_values: bool = True) -> None:
        assert self.version is not None
        storage.resize_(self.version.num_bytes)
        self.is_freed = False
        if with_values:
            storage.copy_(self.version.compute())
            if _checksum(storage) != self.checksum:
                raise NotReproducibleError("an operation was not recorded")


class Recorder:
    """Records the operations of a factory that runs inside `recording()`."""

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}
        self._resident: dict[int, int] = {}
        """The sizes of registered tensors whose memory can be freed; the one used most recently is last."""
        self._next_sweep = 1000
        self._freed_bytes = 0
        self.is_paused = False
        self.has_stopped = False
        """Whether all memory was restored, because threads of the factory cannot be recorded."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Returns a context for the recorder's own operations, which are not recorded."""
        self.is_paused = True
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                yield
        finally:
            self.is_paused = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Returns the context in which a factory must run."""
        with ExitStack() as stack:
            for hook in (
                register_module_parameter_registration_hook(self._register),
                register_module_buffer_registration_hook(self._register),
            ):
                stack.callback(hook.remove)
            stack.enter_context(self._stopping_at_threads())
            stack.enter_context(_Functions(self))
            stack.enter_context(_Operations(self))
            yield

    @contextmanager
    def _stopping_at_threads(self) -> Iterator[None]:
        owner, original = threading.get_ident(), threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if threading.get_ident() == owner:
                self._stop()
            original(thread)

        threading.Thread.start = start  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            threading.Thread.start = original  # type: ignore[method-assign]

    def _stop(self) -> None:
        """Restores all memory, and frees none from now on."""
        with self.paused():
            self.has_stopped = True
            self._restore_except(set())

    def _restore_except(self, keys: set[int]) -> None:
        for key, memory in self._memories.items():
            if memory.is_freed and key not in keys and (storage := memory.storage) is not None:
                memory.restore(storage)

    def recipes(self, tensors: Mapping[str, Tensor]) -> dict[str, Recipe]:
        """Returns the recipes of a model's parameters and buffers, after the factory has returned.

        All other tensors, such as those of a second model, get their memory back.
        """
        with self.paused():
            of_model = {_key(tensor) for tensor in tensors.values() if _has_memory(tensor)}
            self._restore_except(of_model)
            return {name: self._recipe(tensor) for name, tensor in tensors.items()}

    def _recipe(self, tensor: Tensor) -> Recipe:
        memory = self._of(tensor)
        if memory is None or memory.version is None:
            return Recipe(tensor.dtype, kept=tensor.detach(), digest=_digest(tensor.detach()))
        view = _view(tensor, memory.version)
        digest = f"{memory.version.digest} {view.dtype} {view.size} {view.stride} {view.offset}"
        if memory.is_freed:
            return Recipe(tensor.dtype, view=view, checksum=memory.checksum, digest=digest)
        return Recipe(tensor.dtype, kept=tensor.detach(), digest=digest)

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Executes an operation and records it."""
        inputs = _large_tensors((args, kwargs))
        written = {_key(tensor): tensor for tensor in _large_tensors(_written(operation, args, kwargs))}
        replaced = {key for key, tensor in written.items() if _replaces(operation, tensor)}
        if operation is not _aten.detach.default:
            self._make_resident(inputs, without_values=replaced)
        before = {_key(tensor): memory for tensor in inputs if (memory := self._of(tensor)) is not None}
        versions = {key: memory.version for key, memory in before.items()}
        state = None
        if torch.Tag.nondeterministic_seeded in operation.tags:
            state = (kwargs.get("generator") or torch.default_generator).get_state()
        outputs = _execute(operation, args, kwargs)
        call = _Call(operation, args, kwargs, state, versions)
        for key, tensor in written.items():
            memory = self._of(tensor)
            if _key(tensor) != key:  # the tensor was moved to other memory
                if memory is not None:
                    memory.version = None
            elif memory is not None:
                memory.version = call.version_of(tensor, key, key in replaced)
            elif key in replaced:
                self._add(tensor).version = call.version_of(tensor, key, True)
        known = {_key(tensor) for tensor in inputs}
        for number, tensor in enumerate(tree_leaves(outputs)):
            if _is_large(tensor) and _key(tensor) not in known:
                memory = self._add(tensor)
                memory.version = call.version_of_output(tensor, number)
                # copy.deepcopy clones the parameters of a module, and does not register the copies.
                is_clone = operation is _aten.clone.default
                memory.is_registered = is_clone and self.is_registered(args[0])
        self._free_some(_key(tensor) for tensor in (*inputs, *_large_tensors(outputs)))
        return outputs

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keeps tensors in memory for the rest of the recording, because their memory is used directly."""
        for tensor in tensors:
            if (memory := self._of(tensor)) is not None:
                self._make_resident([tensor], without_values=set())
                memory.version = None
                self._resident.pop(_key(tensor), None)

    def is_registered(self, tensor: Tensor) -> bool:
        """Returns whether the memory belongs to a parameter or buffer."""
        memory = self._of(tensor)
        return memory is not None and memory.is_registered

    def _register(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        del module, name
        if tensor is not None and not is_lazy(tensor):
            self.register(tensor)

    def register(self, tensor: Tensor) -> None:
        """Adds a parameter or buffer, whose memory may then be freed."""
        with self.paused():
            if _is_large(tensor):
                memory = self._of(tensor) or self._add(tensor)
                memory.is_registered = True
                self._free_some([_key(tensor)])

    def _of(self, tensor: Tensor) -> _Memory | None:
        return self._memories.get(_key(tensor)) if _has_memory(tensor) else None

    def _add(self, tensor: Tensor) -> _Memory:
        if len(self._memories) >= self._next_sweep:
            for key in [key for key, memory in self._memories.items() if memory.storage is None]:
                del self._memories[key]
                self._resident.pop(key, None)
            self._next_sweep = 2 * len(self._memories) + 1000
        memory = self._memories[_key(tensor)] = _Memory(tensor.untyped_storage())
        return memory

    def _make_resident(self, tensors: Iterable[Tensor], *, without_values: set[int]) -> None:
        for tensor in tensors:
            memory = self._of(tensor)
            if memory is not None and memory.is_freed:
                memory.restore(tensor.untyped_storage(), with_values=_key(tensor) not in without_values)

    def _free_some(self, used: Iterable[int]) -> None:
        """Frees the memory of the tensors that were used least recently, until the limit is met."""
        for key in used:
            self._resident.pop(key, None)
            memory = self._memories.get(key)
            if memory and memory.version and memory.is_registered and not memory.is_freed:
                self._resident[key] = memory.version.num_bytes
        total = 0 if self.has_stopped else sum(self._resident.values())
        while total > RESIDENT_BYTES and len(self._resident) > 1:
            key = next(iter(self._resident))
            total -= self._resident.pop(key)
            memory = self._memories[key]
            if (storage := memory.storage) is not None and memory.version is not None:
                memory.free(storage)
                self._freed_bytes += memory.version.num_bytes
        if self._freed_bytes > RESIDENT_BYTES:
            self._freed_bytes = 0
            return_free_memory()


@dataclass(frozen=True)
class _Call:
    """An operation that was executed, and the versions of its inputs before it."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator: Tensor | None
    versions: Mapping[int, _Version | None]

    def version_of(self, tensor: Tensor, key: int, replaces: bool) -> _Version | None:
        """Returns the version of a tensor that the operation has written to; None if it is not known."""
        previous = None if replaces else self.versions.get(key)
        return None if previous is None and not replaces else self._version(tensor, key, None, previous)

    def version_of_output(self, tensor: Tensor, number: int) -> _Version | None:
        """Returns the version of a new tensor; None if it is not known."""
        return self._version(tensor, None, number, None)

    def _version(
        self, tensor: Tensor, key: int | None, output: int | None, previous: _Version | None
    ) -> _Version | None:
        num_operations, digest = 1, hashlib.sha256(f"{self.operation} {output}".encode())
        if self.generator is not None:
            digest.update(self.generator.numpy().tobytes())

        def encoded(value: Any) -> Any:
            nonlocal num_operations
            if isinstance(value, Tensor) and key is not None and _has_memory(value) and _key(value) == key:
                value = _view(value, None)
            elif _is_large(value):
                version = self.versions.get(_key(value))
                if version is None:
                    raise _UnknownError
                num_operations += version.num_operations
                digest.update(version.digest.encode())
                value = _view(value, version)
            elif isinstance(value, Tensor):
                if not _has_memory(value):
                    raise _UnknownError
                value = value.detach().clone()
                digest.update(_digest(value).encode())
                return value
            shown = replace(value, version=None) if isinstance(value, _View) else value
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
        return _Version(
            self.operation, args, kwargs, self.generator, output, previous, num_bytes, num_operations,
            digest.hexdigest(),
        )  # fmt: skip


class _UnknownError(Exception):
    """An argument has values that cannot be computed again."""


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes every operation on tensors to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if self._recorder.is_paused:
            return func(*args, **(kwargs or {}))
        with self._recorder.paused():
            return self._recorder.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Reports to the recorder uses of a tensor's memory that are not operations."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        name = getattr(func, "__name__", "")
        if name in _OPAQUE:
            with self._recorder.paused():
                self._recorder.keep(_large_tensors(args))
        if name == "__set__" and _is_large(args[0]):  # such as `parameter.data = tensor`
            was_registered = self._recorder.is_registered(args[0])
            func(*args)
            if was_registered:
                self._recorder.register(args[0])
            return None
        return func(*args, **(kwargs or {}))


def _execute(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Executes an operation. Uninitialized memory is set to zero, so that it can be computed again."""
    outputs = operation(*args, **kwargs)
    if operation.overloadpacket in _EMPTY and _is_large(outputs):
        outputs.zero_()
    return outputs


def _has_memory(value: Any) -> bool:
    """Returns whether it is an ordinary tensor on the CPU."""
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, nn.Parameter, nn.Buffer)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not is_lazy(value)
    )


def _is_large(value: Any) -> bool:
    if not _has_memory(value):
        return False
    # The memory of a freed tensor has no bytes, but its shape is known.
    return bool(max(value.untyped_storage().nbytes(), value.numel() * value.itemsize) >= SMALLEST_BYTES)


def _large_tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if _is_large(value)]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _memory_of(num_bytes: int) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()


def _view(tensor: Tensor, version: _Version | None) -> _View:
    size, offset = tuple(map(int, tensor.shape)), int(tensor.storage_offset())
    return _View(version, tensor.dtype, size, tensor.stride(), offset)


def _written(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments that the operation writes to."""
    found = []
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return found


def _replaces(operation: Any, tensor: Tensor) -> bool:
    """Returns whether the operation replaces all values in the memory of the tensor that it writes to."""
    covers = tensor.numel() * tensor.itemsize >= tensor.untyped_storage().nbytes() and tensor.is_contiguous()
    return operation.overloadpacket in _FILLING and covers


def _checksum(storage: torch.UntypedStorage) -> int:
    """Returns a number that depends on all bytes, faster than a cryptographic checksum."""
    values = torch.empty(0, dtype=torch.uint8).set_(storage)
    whole = len(values) // 8 * 8
    return int(values[:whole].view(torch.int64).sum()) + int(values[whole:].sum())


def _digest(tensor: Tensor) -> str:
    """Returns a checksum of a tensor's values, type and shape."""
    if not _has_memory(tensor) or tensor.is_neg() or tensor.is_conj():
        return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.device.type}"
    content = tensor.contiguous().view(-1).view(torch.uint8)
    if tensor.nbytes >= SMALLEST_BYTES:
        total = _checksum(content.clone().untyped_storage())
        return f"{tensor.dtype} {tuple(tensor.shape)} {total}"
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content.numpy().tobytes()).hexdigest()}"
