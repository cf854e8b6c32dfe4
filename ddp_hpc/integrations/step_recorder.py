"""Records the steps of a Trainer, for the callbacks of frameworks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
