"""A backend of torch.compile that compiles nothing, so that tests of compiled steps take seconds.

`python -m tests.training.graphs` is a training with this backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ddp_hpc import train


class Graphs:
    """The backend. It records when each backward graph runs."""

    def __init__(self) -> None:
        self.num = 0
        self.last = -1
        """The number of the graph whose forward pass ran last."""
        self.events: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        number = self.num
        self.num += 1

        def forward(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            def call(*values: Any) -> Any:
                self.last = number
                return graph.forward(*values)

            return make_boxed_func(call)

        def backward(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            def call(*values: Any) -> Any:
                self.events.append("backward")
                return graph.forward(*values)

            return make_boxed_func(call)

        made: Callable[..., Any] = aot_autograd(
            fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition
        )(graph, inputs)
        return made

    @contextmanager
    def used(self) -> Iterator[None]:
        """A context in which torch.compile uses this backend."""
        real = torch.compile

        def compile_by_this(forward: Callable[..., Any], *, mode: str | None, dynamic: bool) -> Any:
            del mode
            return real(forward, backend=self, dynamic=dynamic)

        with mock.patch("torch.compile", compile_by_this):
            yield


def main(argv: list[str]) -> None:
    with Graphs().used():
        train.main(argv)
