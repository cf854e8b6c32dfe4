"""Measures the time of each step without making the device wait for the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

# A point in time: an event on a GPU, or seconds of the host's clock on a CPU.
_Mark: TypeAlias = torch.Event | float


@dataclass
class _Step:
    begin: _Mark
    end: _Mark = 0.0
    num_samples: int = 0
    data_s: float = 0.0
    forwards: list[tuple[_Mark, _Mark]] = field(default_factory=list)
    """Begin and end of the forward pass of each micro-batch."""

    @property
    def own_s(self) -> float:
        """The time without waiting for other ranks."""
        return self.data_s + sum(_seconds(*forward) for forward in self.forwards)


class StepClock:
    """Measures the time spent on data, and the time of whole steps.

    On a CPU, both are host time. A GPU works asynchronously, so each step is measured between two device
    events, which are read together with the losses, when the host waits for the device anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[_Step] = []
        self._forward_begin: _Mark = 0.0
        self._num_read = self._rated_samples = 0
        self._rated_s = 0.0
        self.own_s = 0.0
        """Mean time per step, in the last steps read, without waiting for other ranks: data and forward."""

    def start_step(self) -> None:
        """Marks the beginning of a step."""
        self._steps.append(_Step(self._mark()))

    @contextmanager
    def data(self) -> Iterator[None]:
        """Returns a context in which all time counts as waiting for data. The forward pass follows it."""
        begin_s = time.perf_counter()
        yield
        self._steps[-1].data_s += time.perf_counter() - begin_s
        self._forward_begin = self._mark()

    def end_forward(self) -> None:
        """Marks the end of the forward pass, after which ranks can wait for each other."""
        self._steps[-1].forwards.append((self._forward_begin, self._mark()))

    def end_step(self, num_samples: int) -> None:
        """Marks the end of a step, whose work is done or queued on the device."""
        step = self._steps[-1]
        step.end, step.num_samples = self._mark(), num_samples

    def wait_for_steps(self, num_queued: int) -> None:
        """Waits until at most this number of steps are queued on the device."""
        if len(self._steps) > num_queued and isinstance(end := self._steps[-num_queued - 1].end, torch.Event):
            end.synchronize()

    def read(self, num_kept: int = 0) -> list[tuple[float, float]]:
        """Returns waiting time for data and duration in seconds of each step since the last call.

        The last `num_kept` steps are returned by the next call. Waits until the device has completed the
        others.
        """
        steps = self._steps[: len(self._steps) - num_kept]
        times = [(step.data_s, _seconds(step.begin, step.end)) for step in steps]
        for step, (_, step_s) in zip(steps, times, strict=True):
            # The first step allocates, connects and compiles: it is excluded as soon as there are others.
            if self._num_read == 1:
                self._rated_samples, self._rated_s = 0, 0.0
            self._rated_samples += step.num_samples
            self._rated_s += step_s
            self._num_read += 1
        self.own_s = sum(step.own_s for step in steps) / max(1, len(times))
        del self._steps[: len(steps)]
        return times

    def samples_per_s(self) -> float:
        """Returns the samples per second over all ranks; excludes the first step if there are others."""
        return self._rated_samples / self._rated_s if self._rated_s else 0.0

    def _mark(self) -> _Mark:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device.type, enable_timing=True)
        event.record()
        return event


def _seconds(begin: _Mark, end: _Mark) -> float:
    """Returns the time between two marks. Waits until the device has reached the second one."""
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.Event)
    assert isinstance(end, torch.Event)
    end.synchronize()
    return begin.elapsed_time(end) / 1000
