"""Creates a model that is larger than the memory of the host, with the values that its factory usually gives.

While a factory runs, every operation is executed as usual, so the values and the state of the random number
generators are those of a plain call. The operations on large tensors are recorded, too. When the parameters
and buffers of the modules exceed a limit, the memory of those that were used least recently is freed. If the
factory uses them again, or when they are needed later, the recorded operations are repeated to restore their
values. torchdistx (https://pytorch.org/torchdistx/latest/deferred_init.html) records operations in a similar
way, but executes none of them until the factory has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
from torch.utils._pytree import tree_leaves

from ddp_hpc.training.input.host_memory import return_free_memory
from ddp_hpc.training.tasks.recorded_operations import (
    Call,
    NotReproducibleError,
    Recipe,
    Version,
    checksum_of,
    digest_of,
    execute,
    has_memory,
    is_large,
    key_of,
    large_tensors,
    replaces_all,
    view_of,
    written_tensors,
)

RESIDENT_BYTES = 2**26
"""The largest total size of the parameters and buffers that stay in memory while the factory runs. The one
that was used last stays in memory even if it is larger."""
# Functions that give Python code, or code of other libraries, access to the memory of a tensor.
_OPAQUE = {
    "__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "_typed_storage", "data_ptr", "numpy", "set_",
    "share_memory_", "storage", "tolist", "untyped_storage",
}  # fmt: skip


class _Memory:
    """What is known about the memory of one tensor, and of all tensors that share it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # As long as this reference exists, no other storage has the same address.
        self._pointer = storage._weak_ref()
        self.version: Version | None = None
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
        self.checksum = checksum_of(storage)
        storage.resize_(0)
        self.is_freed = True

    def restore(self, storage: torch.UntypedStorage, *, with_values: bool = True) -> None:
        assert self.version is not None
        storage.resize_(self.version.num_bytes)
        self.is_freed = False
        if with_values:
            storage.copy_(self.version.compute())
            if checksum_of(storage) != self.checksum:
                raise NotReproducibleError("an operation was not recorded")


class Recorder:
    """Records the operations of a factory that runs inside `recording()`."""

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}
        self._resident: dict[int, int] = {}
        """The sizes of registered tensors whose memory can be freed; the one used most recently is last."""
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
            of_model = {key_of(tensor) for tensor in tensors.values() if has_memory(tensor)}
            self._restore_except(of_model)
            return {name: self._recipe(tensor) for name, tensor in tensors.items()}

    def _recipe(self, tensor: Tensor) -> Recipe:
        memory = self._of(tensor)
        if memory is None or memory.version is None:
            return Recipe(tensor.dtype, kept=tensor.detach(), digest=digest_of(tensor.detach()))
        view = view_of(tensor, memory.version)
        digest = f"{memory.version.digest} {view.dtype} {view.size} {view.stride} {view.offset}"
        if memory.is_freed:
            return Recipe(tensor.dtype, view=view, checksum=memory.checksum, digest=digest)
        return Recipe(tensor.dtype, kept=tensor.detach(), digest=digest)

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Executes an operation and records it."""
        inputs = large_tensors((args, kwargs))
        written = {
            key_of(tensor): tensor for tensor in large_tensors(written_tensors(operation, args, kwargs))
        }
        replaced = {key for key, tensor in written.items() if replaces_all(operation, tensor)}
        if operation is not torch.ops.aten.detach.default:
            self._make_resident(inputs, without_values=replaced)
        before = {key_of(tensor): memory for tensor in inputs if (memory := self._of(tensor)) is not None}
        versions = {key: memory.version for key, memory in before.items()}
        state = None
        if torch.Tag.nondeterministic_seeded in operation.tags:
            state = (kwargs.get("generator") or torch.default_generator).get_state()
        outputs = execute(operation, args, kwargs)
        call = Call(operation, args, kwargs, state, versions)
        for key, tensor in written.items():
            memory = self._of(tensor)
            if key_of(tensor) != key:  # the tensor was moved to other memory
                if memory is not None:
                    memory.version = None
            elif memory is not None:
                memory.version = call.version_of(tensor, key, key in replaced)
            elif key in replaced:
                self._add(tensor).version = call.version_of(tensor, key, True)
        known = {key_of(tensor) for tensor in inputs}
        for number, tensor in enumerate(tree_leaves(outputs)):
            if is_large(tensor) and key_of(tensor) not in known:
                memory = self._add(tensor)
                memory.version = call.version_of_output(tensor, number)
                # copy.deepcopy clones the parameters of a module, and does not register the copies.
                is_clone = operation is torch.ops.aten.clone.default
                memory.is_registered = is_clone and self.is_registered(args[0])
        self._free_some(key_of(tensor) for tensor in (*inputs, *large_tensors(outputs)))
        return outputs

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keeps tensors in memory for the rest of the recording, because their memory is used directly."""
        for tensor in tensors:
            if (memory := self._of(tensor)) is not None:
                self._make_resident([tensor], without_values=set())
                memory.version = None
                self._resident.pop(key_of(tensor), None)

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
            if is_large(tensor):
                memory = self._of(tensor) or self._add(tensor)
                memory.is_registered = True
                self._free_some([key_of(tensor)])

    def _of(self, tensor: Tensor) -> _Memory | None:
        return self._memories.get(key_of(tensor)) if has_memory(tensor) else None

    def _add(self, tensor: Tensor) -> _Memory:
        memory = self._memories[key_of(tensor)] = _Memory(tensor.untyped_storage())
        return memory

    def _make_resident(self, tensors: Iterable[Tensor], *, without_values: set[int]) -> None:
        for tensor in tensors:
            memory = self._of(tensor)
            if memory is not None and memory.is_freed:
                memory.restore(tensor.untyped_storage(), with_values=key_of(tensor) not in without_values)

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
                self._recorder.keep(large_tensors(args))
        if name == "__set__" and is_large(args[0]):  # such as `parameter.data = tensor`
            was_registered = self._recorder.is_registered(args[0])
            func(*args)
            if was_registered:
                self._recorder.register(args[0])
            return None
        return func(*args, **(kwargs or {}))
