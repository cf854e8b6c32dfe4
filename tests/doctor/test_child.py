"""Work in a child: its answer, or why there is none, in time."""

import os
import signal
import time
from pathlib import Path

import pytest

from ddp_hpc.doctor.child import Gone, collect, start, stop


def test_the_answer_is_what_the_work_returns() -> None:
    assert collect(start(lambda: {"a": (1, "x")}, 10.0)) == {"a": (1, "x")}


def test_an_answer_larger_than_a_pipe_comes_whole() -> None:
    assert collect(start(lambda: b"x" * 1_000_000, 10.0)) == b"x" * 1_000_000


def test_work_that_hangs_is_given_up_with_its_limit() -> None:
    start_s = time.monotonic()
    assert collect(start(lambda: time.sleep(60), 0.2)) == Gone("no answer within 0.2 s")
    assert time.monotonic() - start_s < 5


def test_what_hung_work_had_started_is_killed_with_it(tmp_path: Path) -> None:
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


def test_an_answer_that_came_in_time_counts_though_it_is_read_late() -> None:
    child = start(lambda: "here", 0.3)
    time.sleep(0.5)
    assert collect(child) == "here"


def test_a_crash_is_told_by_its_signal_and_last_words() -> None:
    def work() -> None:
        os.write(2, b"first\nlibfoo: cannot go on\n\n")
        os.kill(os.getpid(), signal.SIGKILL)

    assert collect(start(work, 10.0)) == Gone("ended by SIGKILL (libfoo: cannot go on)")


@pytest.mark.parametrize("error", [RuntimeError("no\nlibrary"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_is_raised_is_told(error: BaseException) -> None:
    def work() -> None:
        raise error

    gone = collect(start(work, 10.0))
    assert isinstance(gone, Gone)
    assert gone.why.startswith("ended (")


def test_what_a_library_prints_stays_out_of_our_output(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        os.write(1, b"Welcome to MPI\n")
        os.write(2, b"a warning\n")
        return 1

    assert collect(start(work, 10.0)) == 1
    assert capfd.readouterr() == ("", "")


def test_children_that_are_no_longer_wanted_are_stopped() -> None:
    child = start(lambda: time.sleep(60), 60.0)
    stop([child])
    start_s = time.monotonic()
    assert isinstance(collect(child), Gone)
    assert time.monotonic() - start_s < 5
