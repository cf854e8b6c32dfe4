"""Rows that fail in several ways, for test_gpu.py: `python -m tests.bench.broken_rows DIR` runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu import rows
from benchmarks.gpu.rows import Context, Row, train
from benchmarks.gpu.run_tests import run_tests

TESTS = """
import subprocess, sys, time
import pytest
from tests.training.runs import run

def test_passes():
    pass

def test_fails():
    assert 1 == 2

def test_hangs(tmp_path):
    run([sys.executable, "-c", "import time; time.sleep(1234)", OUT], tmp_path)

def test_passes_after_one_that_hangs():
    pass

@pytest.mark.parametrize("number", range(60))
def test_takes_a_second(number):
    time.sleep(1)
"""


def raises(context: Context) -> None:
    context.report(before=1)
    raise ValueError("what was wrong")


def hangs(context: Context) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    argv = [sys.executable, "-c", "import time; time.sleep(1234)", str(context.out)]
    subprocess.Popen(argv, start_new_session=True)
    time.sleep(100)


def tests(context: Context) -> None:
    Path("test_some.py").write_text(f"OUT = {str(context.out)!r}\n{TESTS}")
    run_tests(Path.cwd() / "test_some.py", context.report, limit_s=2)


ROWS = [
    Row("raises", raises),
    Row("refused", lambda context: train(context, "--cuda-graph")),
    Row("crashes", lambda context: os.kill(os.getpid(), signal.SIGSEGV)),
    Row("hangs", hangs, limit_s=0.5),
    Row("tests", tests, limit_s=15.0),
    Row("works", lambda context: context.report(value=2)),
    Row("is stopped", lambda context: time.sleep(1234)),
    Row("is not reached", lambda context: context.report(value=3)),
]


def main(argv: list[str]) -> None:
    rows.ROWS[:] = ROWS
    rows.main(argv)


if __name__ == "__main__":
    from benchmarks.gpu import __main__ as benchmark
    from benchmarks.gpu.page import Page
    from ddp_hpc.base.process_control import adopt_orphans
    from tests.training.forked import Forks

    adopt_orphans()
    benchmark._GRACE_S = 3.0
    forks = Forks() if sys.argv[2] == "forks" else None
    page = Page(Path(sys.argv[1]), "a test", {"machine": {}})
    with tempfile.TemporaryDirectory() as name:
        end_s = time.monotonic() + 200
        runner = benchmark.Runner(page, Path(name), end_s, forks, "tests.bench.broken_rows")
        for row in ROWS:
            if row.name == "is stopped":
                runner.end_s = time.monotonic() + 1.5
            runner.run(row, "cpu")
