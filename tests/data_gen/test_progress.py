"""The progress of a long write: a few lines."""

from __future__ import annotations

import io

from data_gen import progress
from data_gen.progress import report_progress


def shown(num_steps: int) -> list[str]:
    stream = io.StringIO()
    report = report_progress("writing x.h5", stream)
    for step in range(1, num_steps + 1):
        report(step * 1024, num_steps * 1024)
    return stream.getvalue().splitlines()


def test_there_is_a_line_per_tenth_and_one_for_a_quick_write(monkeypatch):
    assert shown(1000) == ["writing x.h5: 100 % of 1000.0 KiB"]
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    assert shown(1000) == [f"writing x.h5: {tenth * 10} % of 1000.0 KiB" for tenth in range(1, 11)]
