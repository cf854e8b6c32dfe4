"""Writes the metrics of steps to a file, to a function of the user, and to the run directory of a job."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import click

from ddp_hpc.base.attempt_end import place_of_end
from ddp_hpc.base.named_object import find_named
from ddp_hpc.base.timeline import Moment, note
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.telemetry.config import TelemetryConfig
from ddp_hpc.training.telemetry.metrics_file import MetricsFile, StepRecord

_MIN_INTERVAL_S, _MIN_INTERVAL_SHARE = 1.0, 0.02


class Sink(Protocol):
    """Receives the records of steps in order, on rank 0."""

    def write(self, records: list[StepRecord]) -> None:
        """Writes the records. If that fails, prints a warning, and the training continues."""

    def close(self) -> None:
        """Closes the sink after the last record."""


class Hook:
    """The user's function `package.module:function`, called with each step as a dict of numbers.

    Raises:
        RequestError: the function does not exist.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._function: Callable[[dict[str, Any]], Any] | None = find_named("--metrics-hook", name)

    def write(self, records: list[StepRecord]) -> None:
        """Calls the function for each record, until it raises an error."""
        for record in records:
            if self._function is None:
                return
            try:
                self._function(dict(vars(record)))
            except Exception as error:  # the user's code may raise anything
                click.echo(
                    f"warning: --metrics-hook {self._name} raised {type(error).__name__}: {error}; "
                    f"it will not be called after step {record.step}",
                    err=True,
                )
                self._function = None

    def close(self) -> None:
        """Does nothing, because the function needs no cleanup."""


class RunTimeline:
    """Writes the mean loss and the times of the steps since the line before to the file `timeline`.

    The time between two lines grows with the duration of the attempt, so that the curve of a minute has as
    many points as that of an hour, but an attempt of two days writes only about 500 lines.
    """

    def __init__(self, run_dir: Path, attempt: str) -> None:
        self._run_dir, self._attempt = run_dir, attempt
        self._began_s = self._noted_s = time.monotonic()
        self._records: list[StepRecord] = []

    def write(self, records: list[StepRecord]) -> None:
        """Writes a line if the last one is old enough."""
        self._records += records
        now_s = time.monotonic()
        if now_s - self._noted_s >= max(_MIN_INTERVAL_S, (now_s - self._began_s) * _MIN_INTERVAL_SHARE):
            self._noted_s = now_s
            self.close()

    def close(self) -> None:
        """Writes a line about the remaining steps."""
        if not self._records:
            return
        steps, self._records = self._records, []
        loss = sum(step.loss for step in steps) / len(steps)
        note(
            self._run_dir,
            self._attempt,
            Moment.STEPS,
            step=steps[-1].step,
            loss=loss if math.isfinite(loss) else None,
            num_steps=len(steps),
            steps_s=sum(step.step_s for step in steps),
            data_s=sum(step.data_s for step in steps),
        )


def open_sinks(config: TelemetryConfig, group: Group, start_step: int) -> list[Sink]:
    """Opens the outputs on rank 0; returns an empty list on the other ranks. Collective."""
    sinks: list[Sink] = []
    with group.failing_together():
        if group.world.rank != 0:
            return sinks
        if place := place_of_end(os.environ):
            sinks.append(RunTimeline(*place))
        if config.metrics_hook is not None:
            sinks.append(Hook(config.metrics_hook))
        # Open this file last, because opening truncates it, and no other sink may fail after that.
        if config.metrics is not None:
            sinks.append(MetricsFile(config.metrics, start_step))
        return sinks
