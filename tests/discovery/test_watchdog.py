"""The time limit, with real processes, some of which are stuck in C code."""

import signal
import sys
from pathlib import Path

from tests.conftest import Launch

HEAD = "import ctypes, os, sys, time\nfrom ddp_hpc.discovery.watchdog import time_limit\n"


# In a separate process, because this one may have children of other tests.
NO_CHILD = """
import os
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child")
"""


def script(body: str) -> list[str | Path]:
    return [sys.executable, "-c", HEAD + body]


def test_a_process_stuck_in_c_code_is_killed_with_one_line(launch: Launch) -> None:
    # PyDLL keeps the interpreter's lock during the call, as an MPI_Init may: no thread could do anything.
    ended = launch(
        script(
            "with time_limit(0.5, '[rank 3/4 n1] ') as watchdog:\n"
            "    watchdog.stage('for the first')\n"
            "    watchdog.stage('in MPI_Init for\\nthe other ranks')\n"
            "    ctypes.PyDLL(None).pause()\n"
        )
    )
    assert ended.exit_code == -signal.SIGKILL
    assert ended.stderr == "[rank 3/4 n1] error: waited 0.5 s in MPI_Init for the other ranks\n"


def test_after_a_block_that_ends_in_time_no_child_process_remains(launch: Launch) -> None:
    body = "try:\n    with time_limit(0.3, ''):\n        raise ValueError('mine')\n"
    body += "except ValueError as error:\n    assert str(error) == 'mine'\ntime.sleep(0.8)\n" + NO_CHILD
    ended = launch(script(body))
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "no child\n", "")


def test_the_watchdog_ends_with_a_killed_process(launch: Launch) -> None:
    process = launch.start(
        script("with time_limit(60, ''):\n    print('ready', flush=True)\n    time.sleep(60)\n")
    )
    assert process.stdout is not None
    process.stdout.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    process.kill()
    # The child has the pipes open: they return end of file after it has ended.
    assert launch.end(process, timeout_s=10).exit_code == -signal.SIGKILL


def test_signals_to_the_process_group_do_not_end_the_watchdog(launch: Launch) -> None:
    body = (
        "import signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "with time_limit(1, '') as watchdog:\n"
        "    time.sleep(0.3)\n"
        "    os.killpg(0, signal.SIGTERM)\n"
        "    time.sleep(20)\n"
    )
    ended = launch(script(body))
    assert ended.exit_code == -signal.SIGKILL
    assert "waited 1 s" in ended.stderr
