"""Functions in child processes: their result, or the reason for a failure, within the time limit."""

import os
import signal
import time
from pathlib import Path

import pytest

from ddp_hpc.doctor.run_in_child import NoAnswer, collect, start


def test_the_result_of_the_function_is_returned() -> None:
    assert collect(start(lambda: {"a": (1, "x")}, 10.0)) == {"a": (1, "x")}


def test_a_hanging_function_is_aborted_after_its_limit() -> None:
    start_s = time.monotonic()
    assert collect(start(lambda: time.sleep(60), 0.2)) == NoAnswer("no answer within 0.2 s")
    assert time.monotonic() - start_s < 30


def test_processes_started_by_a_hanging_function_are_killed(tmp_path: Path) -> None:
    def work() -> None:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        (tmp_path / "pid").write_text(str(pid))
        time.sleep(60)

    collect(start(work, 0.5))
    grandchild = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    end_s = time.monotonic() + 5
    while grandchild.exists() and grandchild.read_text().split()[2] != "Z" and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not grandchild.exists() or grandchild.read_text().split()[2] == "Z"


def test_a_crash_is_reported_with_its_signal_and_last_line_of_output() -> None:
    def work() -> None:
        os.write(2, b"first\nlibfoo: cannot continue\n\n")
        os.kill(os.getpid(), signal.SIGKILL)

    assert collect(start(work, 10.0)) == NoAnswer("killed by SIGKILL (libfoo: cannot continue)")


@pytest.mark.parametrize("error", [RuntimeError("no\nlibrary"), SystemExit(3), KeyboardInterrupt()])
def test_any_exception_is_reported(error: BaseException) -> None:
    def work() -> None:
        raise error

    failure = collect(start(work, 10.0))
    assert isinstance(failure, NoAnswer)
    assert failure.reason.startswith("failed (")


def test_output_of_libraries_is_captured(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        os.write(1, b"Welcome to MPI\n")
        os.write(2, b"a warning\n")
        return 1

    assert collect(start(work, 10.0)) == 1
    assert capfd.readouterr() == ("", "")
