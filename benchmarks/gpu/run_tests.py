"""Runs the tests of a file in this process, and reports the results after each test.

A kill therefore loses only the test that is running, and SIGINT lets pytest write the output so far.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.conftest import PROJECT

TEST_LIMIT_S = 120


class TestLimitError(Exception):
    """A test takes too long."""


class _Results:
    """A plugin of pytest that reports the results, and limits the time of each test."""

    def __init__(self, report: Callable[..., None], limit_s: int) -> None:
        self._report, self._limit_s = report, limit_s
        self._num = {"num_passed": 0, "num_failed": 0, "num_skipped": 0}
        self._failed: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._report(tests=len(session.items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._report(running=nodeid.rpartition("::")[2])

    def pytest_sessionfinish(self) -> None:
        self._report(running="none")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        def stop(*_: object) -> None:
            raise TestLimitError(f"the test takes longer than {self._limit_s} s")

        signal.signal(signal.SIGALRM, stop)
        signal.alarm(self._limit_s)
        try:
            return (yield)
        finally:
            signal.alarm(0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._add(report)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self._num[f"num_{report.outcome}"] += 1
        if report.skipped:
            assert isinstance(report.longrepr, tuple)
            self._report(last_skipped=report.longrepr[2].removeprefix("Skipped: "))
        if report.failed:
            errors = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
            self._failed[report.nodeid.rpartition("::")[2]] = errors[0] if errors else "see the log"
            self._report(failed=f"{len(self._failed)} tests", failures=self._failed)
        self._report(**self._num)


def run_tests(path: Path, report: Callable[..., None], limit_s: int = TEST_LIMIT_S) -> None:
    """Runs the tests of a file, without the options in pyproject.toml, whose plugins may be missing."""
    argv = ["-c", os.devnull, "--rootdir", str(PROJECT), "-p", "no:cacheprovider", "-W", "ignore", "-v"]
    code = pytest.main([*argv, str(path)], plugins=[_Results(report, limit_s)])
    if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        raise RuntimeError(f"pytest ended with {code!r}")
