"""The progress display: a bar on a terminal, a few lines in a log."""

from __future__ import annotations

import io

import pytest

from data_gen import progress
from data_gen.progress import report_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, steps: int) -> str:
    with report_progress("writing x.h5", stream) as report:
        for step in range(1, steps + 1):
            report(step * 1024, steps * 1024)
    return stream.getvalue()


def test_a_log_gets_a_line_per_tenth(monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    lines = shown(io.StringIO(), 1000).splitlines()
    assert lines == [f"writing x.h5: {tenth * 10} % of 1000.0 KiB" for tenth in range(1, 11)]


def test_a_log_of_a_quick_write_gets_one_line():
    assert shown(io.StringIO(), 1000) == "writing x.h5: 100 % of 1000.0 KiB\n"


def test_a_terminal_gets_a_bar():
    text = shown(Terminal(), 10)
    assert "###" in text
    assert "100%" in text


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_without_a_call_there_is_no_output(stream):
    with report_progress("writing x.h5", stream):
        pass
    assert stream.getvalue() == ""
