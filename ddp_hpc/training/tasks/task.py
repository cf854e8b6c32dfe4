"""Creates tasks. A task is a model with its loss, metrics and data.

    --model transformer                       a built-in task, one of TASKS in builtin_models.py
    --model package.module:factory            a task of the user, imported by Python

A factory is called with all options of --model-option, and with `spec` and `dropout` if its signature has
parameters with these names. It returns a `Task`, an object with the attributes of a task, or only a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_hpc.base.errors import DdpHpcError, RequestError, nearest
from ddp_hpc.base.user_code_exceptions import describe_error
from ddp_hpc.data.samples import Samples

Factory = Callable[..., Any]

# torch's cross entropy ignores this label.
IGNORED = -100


@dataclass(frozen=True)
class SampleSpec:
    """The shapes of one sample, without the batch axis."""

    src_shape: tuple[int, ...]
    tgt_shape: tuple[int, ...]
    num_classes: int | None  # only for integer targets

    @classmethod
    def of(cls, samples: Samples) -> SampleSpec:
        """Returns the shapes and the number of classes of these samples."""
        return cls(samples.src.shape, samples.tgt.shape, samples.num_classes)


def _of_src(model: nn.Module, src: Tensor, tgt: Tensor) -> Any:
    del tgt
    return model(src)


def zeros(
    task: Task, samples: Samples, dtype: torch.dtype, device: torch.device, num: int
) -> tuple[Tensor, Tensor]:
    """Returns a batch of `num` samples of zeros, in the data types of the task's model."""
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
    """Returns the cross entropy for integer targets, and the mean squared error for other targets.

    For integer targets, the last axis of the output must contain the scores of the classes.

    Raises:
        DdpHpcError: the shapes of output and targets differ; torch would broadcast them.
    """
    has_classes = not tgt.is_floating_point()
    shape = output.shape if isinstance(output, Tensor) else None
    if shape is None or (shape[:-1] if has_classes else shape) != tgt.shape:
        seen, needed = _kind(output) if shape is None else tuple(shape), tuple(tgt.shape)
        raise DdpHpcError(
            f"the model's output is {seen} for targets {needed}, but the default loss requires "
            f"{needed}{' plus a last axis of classes' * has_classes}. Change the model or the data, or "
            "return a task with its own `loss`"
        )
    if has_classes:
        return label_loss(output.reshape(-1, output.shape[-1]), tgt.reshape(-1))
    return functional.mse_loss(output, tgt)


def label_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross entropy of scores (B, C) and labels (B,) from 0 to C - 1.

    Raises:
        DdpHpcError: on a CPU, for a label out of range; on a GPU a CUDA assertion fails.
    """
    return explaining_labels(lambda: functional.cross_entropy(scores, labels), labels, scores.shape[1])


def explaining_labels(compute: Callable[[], Tensor], labels: Tensor, num: int) -> Tensor:
    """Returns the loss that `compute` returns for labels from 0 to `num` - 1, or -100, which torch ignores.

    Raises:
        DdpHpcError: on a CPU, for a label out of range; on a GPU, the host would have to wait for a check.
    """
    is_cpu = labels.device.type == "cpu"
    if torch.compiler.is_compiling():
        if is_cpu:  # compiled code would end the process
            _check_labels(labels, num)
        return compute()
    try:
        return compute()
    except (IndexError, RuntimeError):
        if is_cpu:
            _check_labels(labels, num)
        raise


def _check_labels(labels: Tensor, num: int) -> None:
    is_wrong = ((labels < 0) | (labels >= num)) & (labels != IGNORED)
    if is_wrong.any():
        raise DdpHpcError(
            f"the data contains the label {labels[is_wrong][0].item()}, but the model has {num} classes (0 "
            f"to {num - 1}). Correct the labels, or the file's num_classes"
        ) from None


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its loss and metrics. The first axis of all tensors is the batch axis."""

    model: nn.Module
    loss: Callable[[Any, Tensor], Tensor] = default_loss
    """`loss(output, tgt)`: the mean over the batch as a scalar; all samples have equal weight."""
    fused_loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None
    """`fused_loss(model, src, tgt)`: the same loss, for models that need no complete output for it."""
    forward: Callable[[nn.Module, Tensor, Tensor], Any] = _of_src
    """`forward(model, src, tgt)`: the model's output. `model` may be wrapped; do not call `Task.model`."""
    num_correct: Callable[[Any, Tensor], Tensor] | None = None
    """`num_correct(output, tgt)`: the number of correct answers in a batch; None: no accuracy."""
    metrics: Mapping[str, Callable[[Any, Tensor], Tensor]] = field(default_factory=dict)
    """Additional metrics for evaluation, by name: each returns the sum over a batch, a scalar."""
    dataset: Any = None
    """Training data without --data: a path, two arrays or tensors, or a dataset with `len` and `[i]`."""
    test_dataset: Any = None
    """Test data for an evaluation after each epoch, together with `dataset`: two arrays, or a dataset."""
    src_indices: bool | None = None
    """True: src is passed as int64; False: in the dtype of the training; None: as int64 if it is integers."""
    tgt_indices: bool | None = None
    """Whether tgt is passed as int64; the values mean the same as for `src_indices`."""
    tensor_parallel: Callable[[nn.Module], Mapping[str, Any]] | None = None
    """The plan for `torch.distributed.tensor.parallel.parallelize_module`."""
    stages: Callable[[nn.Module, int], Sequence[nn.Module]] | None = None
    """`stages(model, num)`: the model as `num` modules, applied one after another to src (or src, tgt)."""

    def inputs(self, src: Tensor, tgt: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Converts a batch to the data types of the model."""
        return _cast(src, self.src_indices, dtype), _cast(tgt, self.tgt_indices, dtype)


def _cast(values: Tensor, indices: bool | None, dtype: torch.dtype) -> Tensor:
    if indices is None:
        indices = not values.is_floating_point()
    return values.to(torch.int64 if indices else dtype)


def make_task(
    name: str,
    factory: Factory,
    spec: SampleSpec | None,
    dropout: float,
    options: Mapping[str, Any],
    seed: int,
) -> Task:
    """Calls the factory, right after `torch.manual_seed(seed)`, and returns its task.

    Raises:
        RequestError: the factory raises, does not take an option, or does not return a model.
    """
    offered = {"dropout": dropout, **({} if spec is None else {"spec": spec})}
    arguments = _arguments(name, factory, offered, options)
    torch.manual_seed(seed)
    try:
        made = factory(**arguments)
    except DdpHpcError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise RequestError(f"--model {name}: the factory raised {describe_error(error)}") from None
    return as_task(name, made)


def as_task(name: str, made: object) -> Task:
    """Converts the return value of a factory to a task.

    Raises:
        RequestError: it has no model, or an attribute is invalid.
    """
    if isinstance(made, Task):
        task = made
    elif isinstance(made, nn.Module) and not isinstance(getattr(made, "model", None), nn.Module):
        defined = {f.name: getattr(made, f.name) for f in fields(Task) if f.name in ("loss", "num_correct")
                  and callable(getattr(made, f.name, None))}  # fmt: skip
        task = Task(**{"model": made, **defined})
    else:
        given = {f.name: getattr(made, f.name) for f in fields(Task) if hasattr(made, f.name)}
        if not isinstance(given.get("model"), nn.Module):
            raise RequestError(
                f"--model {name}: the factory returned {_kind(made)}; it must return a torch.nn.Module "
                "or a Task"
            )
        task = Task(**given)
    if not isinstance(task.model, nn.Module):
        raise RequestError(f"--model {name}: its `model` must be a torch.nn.Module, not {_kind(task.model)}")
    for part in ("loss", "forward"):
        if not callable(getattr(task, part)):
            raise RequestError(
                f"--model {name}: its `{part}` must be a function, not {_kind(getattr(task, part))}"
            )
    if not any(parameter.requires_grad for parameter in task.model.parameters()):
        raise RequestError(
            f"--model {name}: the model has no parameters to train; at least one must require gradients"
        )
    fused = None if task.fused_loss is None else _scalar(name, task.fused_loss)
    return replace(task, loss=_scalar(name, task.loss), fused_loss=fused)


def _scalar(name: str, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps the loss in a check that it returns a scalar."""

    def checked(*arguments: Any) -> Tensor:
        value = loss(*arguments)
        if not isinstance(value, Tensor) or value.dim():
            seen = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else _kind(value)
            raise DdpHpcError(
                f"--model {name}: its `loss` must return a scalar tensor (the batch mean), not {seen}"
            )
        return value

    return checked


def shapes_text(model: nn.Module) -> str:
    """Lists names, shapes and types of all parameters and buffers, for a comparison between ranks."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return "; ".join(
        f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in tensors.items()
    )


def _arguments(
    name: str, factory: Factory, offered: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the factory's arguments: all options, and the offered ones that are in its signature."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # functions that are implemented in C have no signature
        return dict(options)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for option in options:
        if option not in named and not takes_all:
            known = ", ".join(p for p in named if p not in offered and p != "spec") or "none"
            raise RequestError(
                f"--model-option {option}: {name} has no such option{nearest(option, named)}; it has {known}"
            )
    arguments = {**{key: value for key, value in offered.items() if key in named}, **options}
    missing = [p for p in named if p not in arguments and parameters[p].default is inspect.Parameter.empty]
    if "spec" in missing:
        raise RequestError(
            f"--model {name} requires the shapes of the samples (argument spec): use --data FILE"
        )
    if missing:
        raise RequestError(
            f"--model {name} requires {', '.join(f'--model-option {m}=VALUE' for m in missing)}"
        )
    return arguments


def _kind(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"
