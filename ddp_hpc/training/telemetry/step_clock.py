"""Measures the time of each step without making the device wait for the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepClock:
    """Measures the time spent on data, and the time of whole steps.

    On a CPU, both are host time. A GPU works asynchronously, so each step is measured between two device
    events, which are read together with the losses, when the host waits for the device anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_events = device.type != "cpu"
        self._data_s: list[float] = []
        self._own_s: list[float] = []
        self._own_events: list[list[tuple[torch.Event, torch.Event]]] = []
        self._begun: torch.Event | float = 0.0
        self._step_s: list[float] = []
        self._events: list[tuple[torch.Event, torch.Event]] = []
        self._started: torch.Event | None = None
        self._start_s = 0.0
        self._steps = self._samples = 0
        self._rated_s = 0.0
        self._num_samples: list[int] = []
        self.own_s = 0.0
        """Mean time per step, in the last steps read, without waiting for other ranks: data and forward."""

    def start_step(self) -> None:
        """Marks the beginning of a step."""
        if self._has_events:
            self._started = self._event()
        self._data_s.append(0.0)
        self._own_s.append(0.0)
        self._own_events.append([])
        self._start_s = time.perf_counter()

    @contextmanager
    def data(self) -> Iterator[None]:
        """Returns a context in which all time counts as waiting for data."""
        begin_s = time.perf_counter()
        yield
        waited_s = time.perf_counter() - begin_s
        self._data_s[-1] += waited_s
        self._own_s[-1] += waited_s
        self._begun = self._event() if self._has_events else time.perf_counter()

    def end_forward(self) -> None:
        """Marks the end of the forward pass, after which ranks can wait for each other."""
        if isinstance(self._begun, float):
            self._own_s[-1] += time.perf_counter() - self._begun
        else:
            self._own_events[-1].append((self._begun, self._event()))

    def end_step(self, num_samples: int) -> None:
        """Marks the end of a step, whose work is done or queued on the device."""
        if self._has_events:
            assert self._started is not None
            self._events.append((self._started, self._event()))
        else:
            self._step_s.append(time.perf_counter() - self._start_s)
        self._num_samples.append(num_samples)

    def read(self) -> list[tuple[float, float]]:
        """Returns `data_s` and `step_s` of each step since the last call. Waits for the device."""
        if self._has_events:
            self._step_s = []
            for start, end in self._events:
                end.synchronize()
                self._step_s.append(start.elapsed_time(end) / 1000)
            self._events.clear()
        times = list(zip(self._data_s, self._step_s, strict=True))
        for num_samples, (_, step_s) in zip(self._num_samples, times, strict=True):
            # The first step allocates, connects and compiles: it is excluded as soon as there are others.
            if self._steps == 1:
                self._samples, self._rated_s = 0, 0.0
            self._samples += num_samples
            self._rated_s += step_s
            self._steps += 1
        for i, pairs in enumerate(self._own_events):
            self._own_s[i] += sum(begin.elapsed_time(end) for begin, end in pairs) / 1000
        self.own_s = sum(self._own_s) / max(1, len(times))
        self._data_s, self._step_s, self._num_samples, self._own_s, self._own_events = [], [], [], [], []
        return times

    def samples_per_s(self) -> float:
        """Returns the samples per second over all ranks; excludes the first step if there are others."""
        return self._samples / self._rated_s if self._rated_s else 0.0

    def _event(self) -> torch.Event:
        event = torch.Event(self._device.type, enable_timing=True)
        event.record()
        return event
