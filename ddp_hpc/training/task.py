"""What is trained: a model, how its loss is taken, how right it is. Built in, or brought by the user.

    --model transformer                       one of TASKS in models.py
    --model package.module:factory            the user's own, found as Python finds it

A factory gets those of `spec`, `dropout` and each --model-option that its signature names, and
gives a `Task`, an object with a task's attributes, or a model alone.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_hpc.data.samples import Samples
from ddp_hpc.errors import DdpHpcError, RequestError, nearest

Factory = Callable[..., Any]


@dataclass(frozen=True)
class SampleSpec:
    """What one sample looks like, without the batch axis."""

    src_shape: tuple[int, ...]
    tgt_shape: tuple[int, ...]
    num_classes: int | None  # for integer targets

    @classmethod
    def of(cls, samples: Samples) -> SampleSpec:
        """That of the samples of a file."""
        return cls(samples.src_shape, samples.tgt_shape, samples.num_classes)


def _of_src(model: nn.Module, src: Tensor, tgt: Tensor) -> Any:
    del tgt
    return model(src)


def zeros(
    task: Task, samples: Samples, dtype: torch.dtype, device: torch.device, num: int
) -> tuple[Tensor, Tensor]:
    """A batch of so many samples of zeros, in the types that the task's model takes."""
    src, tgt = (
        torch.zeros(
            (num, *info.shape),
            dtype=torch.int64 if info.dtype.kind in "biu" and not info.bfloat16 else dtype,
            device=device,
        )
        for info in (samples.src, samples.tgt)
    )
    return task.inputs(src, tgt, dtype)


def default_loss(output: Any, tgt: Tensor) -> Tensor:
    """Cross entropy for integer targets (classes on the output's last axis), else the mean square error.

    Raises:
        DdpHpcError: the output's shape is not that of the targets; torch would spread one over the other.
    """
    has_classes = not tgt.is_floating_point()
    shape = output.shape if isinstance(output, Tensor) else None
    if shape is None or (shape[:-1] if has_classes else shape) != tgt.shape:
        seen, needed = _kind(output) if shape is None else tuple(shape), tuple(tgt.shape)
        raise DdpHpcError(
            f"the model's output is {seen} for a batch of targets {needed}, and the default loss needs "
            f"{needed}{' and an axis of classes behind' * has_classes}; change the model or the data, or "
            "give a task with a `loss` of its own"
        )
    if has_classes:
        return functional.cross_entropy(output.reshape(-1, output.shape[-1]), tgt.reshape(-1))
    return functional.mse_loss(output, tgt)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the loop needs to know of a model.

    Tensors of a batch have the batch as their first axis.
    """

    model: nn.Module
    loss: Callable[[Any, Tensor], Tensor] = default_loss
    """Of an output and its tgt: the mean over the batch, a scalar, every sample weighing the same."""
    forward: Callable[[nn.Module, Tensor, Tensor], Any] = _of_src
    """The model's output for src and tgt. The model that it gets may be wrapped: call that one."""
    num_correct: Callable[[Any, Tensor], Tensor] | None = None
    """How many of a batch's answers are right; None: no such notion."""
    metrics: Mapping[str, Callable[[Any, Tensor], Tensor]] = field(default_factory=dict)
    """More numbers of an evaluation, by name: each the sum over the samples of a batch, a scalar."""
    dataset: Any = None
    """What to train on without --data: a path, two arrays or tensors, or a dataset with `len` and `[i]`."""
    test_dataset: Any = None
    """What to evaluate on after each epoch, where `dataset` is used: two arrays, or a dataset."""
    src_indices: bool | None = None
    """Whether src comes as int64, else in the type of the training; None: where the data has integers."""
    tgt_indices: bool | None = None
    tensor_parallel: Callable[[nn.Module], Mapping[str, Any]] | None = None
    """The plan for `torch.distributed.tensor.parallel.parallelize_module`."""
    stages: Callable[[nn.Module, int], Sequence[nn.Module]] | None = None
    """The model in so many modules; one after another, from src (or src and tgt), they give its output."""

    def inputs(self, src: Tensor, tgt: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A batch in the types that the model takes."""
        return _cast(src, self.src_indices, dtype), _cast(tgt, self.tgt_indices, dtype)


def _cast(values: Tensor, indices: bool | None, dtype: torch.dtype) -> Tensor:
    if indices is None:
        indices = not values.is_floating_point()
    return values.to(torch.int64 if indices else dtype)


def find_factory(name: str) -> Factory:
    """The function or class that `--model package.module:factory` names; errors as `find_named`."""
    return find_named("--model", name)


def find_named(option: str, name: str) -> Callable[..., Any]:
    """The function or class that `package.module:name` names.

    Raises:
        RequestError: there is no such module, it cannot be imported, or has no such name in it.
    """
    module_name, _, path = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise RequestError(f"{option} {name}: package.module:name is needed, Python names joined by dots")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise RequestError(f"{option} {name}: cannot be imported: {_told(error)}") from None
        raise RequestError(
            f"{option} {name}: there is no module {error.name} in {Path.cwd()} or where else Python looks; "
            "start in its folder, or put that into PYTHONPATH"
        ) from None
    except Exception as error:  # the user's code may raise anything
        raise RequestError(f"{option} {name}: cannot be imported: {_told(error)}") from None
    for part in path.split("."):
        if not hasattr(found, part):
            hint = nearest(part, [known for known in vars(found) if not known.startswith("_")])
            raise RequestError(f"{option} {name}: {module_name} has no {part}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise RequestError(f"{option} {name}: is a {type(found).__name__}; a function or a class is needed")
    return found  # type: ignore[no-any-return]


def make_task(
    name: str,
    factory: Factory,
    spec: SampleSpec | None,
    dropout: float,
    options: Mapping[str, Any],
    seed: int,
) -> Task:
    """The factory's task, its parameters drawn right after `torch.manual_seed(seed)`.

    Raises:
        RequestError: the factory raises, does not take an option, or gives no model.
    """
    offered = {"dropout": dropout, **({} if spec is None else {"spec": spec})}
    arguments = _arguments(name, factory, offered, options)
    torch.manual_seed(seed)
    try:
        made = factory(**arguments)
    except DdpHpcError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise RequestError(f"--model {name}: the factory raised {_told(error)}") from None
    return as_task(name, made)


def as_task(name: str, made: object) -> Task:
    """What a factory gave, as a task.

    Raises:
        RequestError: there is no model in it, or an attribute of a task that is none.
    """
    if isinstance(made, Task):
        task = made
    elif isinstance(made, nn.Module) and not isinstance(getattr(made, "model", None), nn.Module):
        brings = {f.name: getattr(made, f.name) for f in fields(Task) if f.name in ("loss", "num_correct")
                  and callable(getattr(made, f.name, None))}  # fmt: skip
        task = Task(**{"model": made, **brings})
    else:
        given = {f.name: getattr(made, f.name) for f in fields(Task) if hasattr(made, f.name)}
        if not isinstance(given.get("model"), nn.Module):
            raise RequestError(
                f"--model {name}: the factory gave {_kind(made)} without a model; a torch.nn.Module is "
                "needed, or a task with one"
            )
        task = Task(**given)
    if not isinstance(task.model, nn.Module):
        raise RequestError(f"--model {name}: its `model` is {_kind(task.model)}; a torch.nn.Module is needed")
    for part in ("loss", "forward"):
        if not callable(getattr(task, part)):
            raise RequestError(
                f"--model {name}: its `{part}` is {_kind(getattr(task, part))}; a function is needed"
            )
    if not any(parameter.requires_grad for parameter in task.model.parameters()):
        raise RequestError(f"--model {name}: the model has no parameters to train")
    return replace(task, loss=_scalar(name, task.loss))


def _scalar(name: str, loss: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """The loss, which ends the job in one line where it gives no scalar."""

    def checked(output: Any, tgt: Tensor) -> Tensor:
        found = loss(output, tgt)
        if not isinstance(found, Tensor) or found.dim():
            seen = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else _kind(found)
            raise DdpHpcError(
                f"--model {name}: its `loss` gives {seen}; a scalar tensor is needed, the mean over the batch"
            )
        return found

    return checked


def shapes_text(model: nn.Module) -> str:
    """Names, shapes and types of all parameters and buffers, to be compared over ranks."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return "; ".join(
        f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in tensors.items()
    )


def _arguments(
    name: str, factory: Factory, offered: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """What of the offered the factory names, and all options."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # of C code
        return dict(options)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for option in options:
        if option not in named and not takes_all:
            known = ", ".join(p for p in named if p not in offered and p != "spec") or "none"
            raise RequestError(
                f"--model-option {option}: {name} has no such option{nearest(option, named)}; it has {known}"
            )
    found = {**{key: value for key, value in offered.items() if key in named}, **options}
    missing = [p for p in named if p not in found and parameters[p].default is inspect.Parameter.empty]
    if "spec" in missing:
        raise RequestError(
            f"--model {name}: it asks what the samples look like (spec): name a file with --data"
        )
    if missing:
        raise RequestError(
            f"--model {name}: give it {', '.join(f'--model-option {m}=VALUE' for m in missing)}"
        )
    return found


def _kind(value: object) -> str:
    return "nothing (None)" if value is None else f"an object of type {type(value).__name__}"


def _told(error: BaseException) -> str:
    """`ValueError: bad width (mine.py, line 12)`: where in the user's code it was raised."""
    told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    if isinstance(error, SyntaxError) or not frames or frames[-1].filename == __file__:
        return told
    return f"{told} ({frames[-1].filename}, line {frames[-1].lineno})"
