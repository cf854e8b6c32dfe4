"""A batch of `world.loader`, and its division into micro-batches for gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from ddp_hpc.base.errors import RequestError


class Batch(NamedTuple):
    """One rank's samples of a step, on its device, in the dtypes of the data."""

    src: Tensor
    """The inputs, of shape (samples, ...), if a sample is a pair; otherwise use `data`."""
    tgt: Tensor
    """The targets, of shape (samples, ...), if a sample is a pair; otherwise use `data`."""
    weight: float
    """The factor by which the mean loss of this batch must be multiplied before backward. DDP averages the
    gradients over ranks; with this factor, each sample of the step has the same effect. It is 1.0 except in a
    smaller last step of an epoch. It is 0.0 for a rank without samples in that step; this rank gets another
    sample, so that it can take part in the backward pass.
    """
    step: int
    """The number of the step, counted from 1 over all epochs."""
    epoch: int
    """The number of the epoch, counted from 1."""
    ends_epoch: bool
    """Whether this is the last step of the epoch."""

    @property
    def data(self) -> Any:
        """The samples as `collate_fn` has combined them: a tuple or dict of tensors, for example."""
        return self.src if self.tgt is None else (self.src, self.tgt)

    def micro_batches(self, num: int, *models: nn.Module) -> Iterator[Batch]:
        """Yields this batch in `num` parts, so that a step needs less memory for activations.

        Run forward and backward for each part, multiply its loss by its `weight`, and call the optimizer
        after the last part. The gradients are then those of the whole batch. Ranks communicate the gradients
        of `models`, which `wrap` has returned, only during the last backward pass.

        Every rank gets `num` parts. If there are fewer samples, parts with weight 0 repeat the first one.

        Raises:
            RequestError: a value of the batch has no axis of samples, or a model has a static graph.
        """
        if num < 1:
            raise RequestError(f"micro_batches({num}): the number of parts must be 1 or greater")
        rows = num_rows(self.data)
        for model in models:
            if num > 1 and getattr(model, "static_graph", False):
                raise RequestError(
                    "micro_batches() does not support wrap(..., static_graph=True): "
                    "DDP would omit gradients. Remove static_graph"
                )
        for part in range(num):
            start, stop = (rows * index // num for index in (part, part + 1))
            is_empty = start == stop
            first, last = (0, 1) if is_empty else (start, stop)
            share = 0.0 if is_empty else (stop - start) / rows
            with ExitStack() as without_communication:
                for model in models:
                    _communicate(model, part == num - 1, without_communication)
                yield make_batch(
                    map_values(partial(_rows, rows=slice(first, last), num=rows), self.data),
                    self.weight * share, self.step, self.epoch, self.ends_epoch,
                )  # fmt: skip


def make_batch(data: Any, weight: float, step: int, epoch: int, ends_epoch: bool) -> Batch:
    """Returns a batch of collated samples. The elements of a pair become `src` and `tgt`."""
    is_pair = isinstance(data, tuple | list) and len(data) == 2
    src, tgt = data if is_pair else (data, cast(Tensor, None))
    return Batch(src, tgt, weight, step, epoch, ends_epoch)


def map_values(function: Callable[[Any], Any], data: Any) -> Any:
    """Returns the data with the result of `function` in place of each value that is not a container."""
    if isinstance(data, Mapping):
        return _like(data, {key: map_values(function, value) for key, value in data.items()})
    # The default collate_fn returns strings, which cannot be stored in a tensor, as a list with one string
    # per sample.
    if not isinstance(data, list | tuple) or all(isinstance(value, str) for value in data):
        return function(data)
    values = [map_values(function, value) for value in data]
    return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)  # a named tuple


def num_rows(data: Any) -> int:
    """Returns the number of samples, which is the length of the first axis of all tensors.

    Raises:
        RequestError: the tensors have different lengths, or there is none.
    """
    shapes: list[tuple[int, ...]] = []
    map_values(lambda value: shapes.append(value.shape) if _has_rows(value) else None, data)
    if not shapes:
        raise RequestError(
            f"a batch of type {type(data).__name__} contains no tensors that can be divided by samples; "
            "collate_fn must return a tensor, or a tuple or dict of tensors"
        )
    for shape in shapes:
        if shape[0] != shapes[0][0]:
            raise RequestError(
                f"a batch contains tensors of shapes {tuple(shapes[0])} and {tuple(shape)}; the first axis "
                "of every tensor must be the sample axis"
            )
    return shapes[0][0]


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _rows(value: Any, rows: slice, num: int) -> Any:
    """Returns some of the `num` samples of a value, or a value that is the same for all samples."""
    is_list = isinstance(value, list | tuple) and len(value) == num
    return value[rows] if is_list or _has_rows(value) else value


def _like(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Returns a mapping of the same type, such as the BatchEncoding of a tokenizer, or a dict."""
    try:
        return type(original)(values)  # type: ignore[call-arg]
    except TypeError:
        return values


def _communicate(model: nn.Module, is_last: bool, until: ExitStack) -> None:
    """Lets a wrapped model communicate gradients only during the last backward pass of a step."""
    shard: Any = model
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        shard.set_requires_gradient_sync(is_last)
    elif hasattr(model, "no_sync") and not is_last:  # DDP
        until.enter_context(shard.no_sync())
