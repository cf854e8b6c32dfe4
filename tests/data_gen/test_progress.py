"""The progress of a long write: a few lines, or a bar on a terminal."""

from __future__ import annotations

import contextlib
import io
import os

from data_gen import progress
from data_gen.progress import shown_progress


def shown(num_steps: int) -> list[str]:
    stream = io.StringIO()
    with shown_progress("writing x.h5", stream) as report:
        for step in range(1, num_steps + 1):
            report(step * 1024, num_steps * 1024)
    return stream.getvalue().splitlines()


def test_there_is_a_line_per_tenth_and_one_for_a_quick_write(monkeypatch):
    assert shown(1000) == ["writing x.h5: 100 % of 1000.0 KiB"]
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    assert shown(1000) == [f"writing x.h5: {tenth * 10} % of 1000.0 KiB" for tenth in range(1, 11)]


def test_a_terminal_shows_a_bar_until_the_end_or_an_error():
    screen, terminal = os.openpty()
    with (
        open(terminal, "w") as stream,  # noqa: PTH123 - a file descriptor
        contextlib.suppress(OSError),
        shown_progress("writing x.h5", stream) as report,
    ):
        report(1024, 4096)
        report(2048, 4096)
        raise OSError("the disk is full")
    text = ""
    with contextlib.suppress(OSError):  # EIO, after everything was read: the terminal has been closed
        while part := os.read(screen, 10_000):
            text += part.decode()
    os.close(screen)
    assert "writing x.h5" in text
    assert "  25%" in text
    assert " 50%" in text
    assert text.endswith("\n"), "an error message begins on a new line"
