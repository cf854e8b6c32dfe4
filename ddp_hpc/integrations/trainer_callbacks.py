"""What the callbacks of all frameworks need: recording steps, and the check that all ranks train together."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import RequestError
from ddp_hpc.library.tracing import tracing
from ddp_hpc.training.telemetry.profiler import Trace


class StepRecorder:
    """Records a window of steps between `start` and `stop`, which callbacks of a Trainer call.

    `window` contains the arguments of `ddp_hpc.tracing`.
    """

    def __init__(self, folder: str | Path, window: dict[str, Any]) -> None:
        self._folder, self._window = folder, window
        self._recording = ExitStack()
        self._trace: Trace | None = None

    def start(self) -> None:
        """Starts the profiler.

        Raises:
            RequestError: the directory cannot be created, or the window contains no step.
        """
        self._trace = self._recording.enter_context(tracing(self._folder, **self._window))

    def step(self) -> None:
        """Counts a step."""
        if self._trace is not None:
            self._trace.step()

    def stop(self) -> None:
        """Stops the profiler, and writes the trace if the window has not ended yet."""
        self._recording.close()


def refuse_separate_ranks(world_size: int, remedy: str) -> None:
    """Checks that a Trainer of `world_size` ranks uses all ranks. The error message contains `remedy`.

    Raises:
        RequestError: the launcher started several ranks, but the Trainer trains separately on each of them.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 < num_ranks:
        raise RequestError(
            f"{num_ranks} ranks were started, but the Trainer trains separately on each of them; {remedy}"
        )
