"""Prints messages and the progress of the training on rank 0."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TextIO


class Progress:
    """Prints lines and the progress of the training. On ranks other than 0, nothing is printed."""

    def __init__(self, prints: bool, stream: TextIO | None = None) -> None:
        stream = stream if stream is not None else sys.stdout
        self._prints = prints and stream is not None  # stdout may have been closed
        self._stream = stream
        self._first_step = 0
        self._start_s = 0.0

    def say(self, text: str) -> None:
        """Prints a line."""
        if self._prints:
            # The training continues if the disk is full or the reader of a pipe has exited.
            with suppress(OSError):
                self._stream.write(f"{text}\n")
                self._stream.flush()

    def step(self, done: int, total: int, epoch: str, loss: float, samples_per_s: float) -> None:
        """Shows the progress, as in `epoch 1/10 step 10/640 loss 29.95 61.3 samples/s eta 0:10:12`."""
        if not self._prints:
            return
        now_s = time.perf_counter()
        if not self._first_step:  # no estimate from the first step, which takes longer than the others
            self._first_step, self._start_s = done, now_s
            eta = "?"
        else:
            left_s = int((now_s - self._start_s) / (done - self._first_step) * (total - done))
            eta = f"{left_s // 3600}:{left_s % 3600 // 60:02d}:{left_s % 60:02d}"
        self.say(f"epoch {epoch} step {done}/{total} loss {loss:.6f} {samples_per_s:.1f} samples/s eta {eta}")
