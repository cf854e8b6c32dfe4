"""Processes that end together with the process that started them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import Launch, clean_environ
from tests.job_processes import is_alive

S = 15.0


def program(body: str, grace_s: float = 1.0) -> str:
    return f"""
import os, signal, subprocess, sys, time
from ddp_hpc.rendezvous import end_with_parent
end_with_parent._GRACE_S = {grace_s}

def agent():
{body}

sys.exit(end_with_parent.run_guarded(agent, "the agent"))
"""


SPAWN = """
    sleeps = "import signal, time; print('up', flush=True); time.sleep(60)"
    for code in (sleeps, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + sleeps):
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    print("agent", os.getpid(), flush=True)
"""


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def guarded() -> Iterator[tuple[subprocess.Popen[str], int, list[int]]]:
    """Starts a guard; yields it with the process ids of its agent and of two children of the agent."""
    code = program(SPAWN + "    time.sleep(60)")
    guard = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(),
    )
    assert guard.stdout is not None
    lines = [guard.stdout.readline().split() for _ in range(3)]
    (agent,) = [int(line[1]) for line in lines if line[0] == "agent"]
    started = children_of(agent)
    assert len(started) == 2
    yield guard, agent, started
    for pid in (guard.pid, agent, *started):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    guard.communicate()


def test_the_children_of_a_killed_agent_are_ended(
    guarded: tuple[subprocess.Popen[str], int, list[int]],
) -> None:
    guard, agent, started = guarded
    os.kill(agent, signal.SIGKILL)
    assert guard.wait(S) == 128 + signal.SIGKILL
    assert not any(map(is_alive, started))
    assert guard.stderr is not None
    (line,) = guard.stderr.read().splitlines()
    assert line.endswith("error: the agent was killed by SIGKILL")


def test_sigterm_reaches_the_agent(guarded: tuple[subprocess.Popen[str], int, list[int]]) -> None:
    guard, agent, started = guarded
    guard.terminate()
    assert guard.wait(S) == 128 + signal.SIGTERM
    assert not any(map(is_alive, (agent, *started)))


@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("sys.exit(7)", 7)])
def test_the_guard_returns_the_agents_exit_code(launch: Launch, end: str, code: int) -> None:
    ended = launch([sys.executable, "-c", program(f"    print('out', flush=True); {end}")])
    assert (ended.exit_code, ended.stdout, ended.stderr) == (code, "out\n", "")


def test_sigterm_while_an_agent_exits_does_not_change_its_exit_code(launch: Launch) -> None:
    """Python's finalization resets signal handlers before it deletes the last objects, such as this one."""
    body = """
    class Late:
        def __init__(self):
            self.kill, self.pid, self.signal = os.kill, os.getpid(), signal.SIGTERM
        def __del__(self):
            self.kill(self.pid, self.signal)
    signal.signal(signal.SIGTERM, lambda *_: None)
    sys.late = Late()
    sys.exit(2)
"""
    done = launch([sys.executable, "-c", program(body)])
    assert (done.exit_code, done.stderr) == (2, "")
