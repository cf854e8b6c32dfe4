"""The stacks of a running program, by py-spy and by faulthandler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_hpc.discovery.python_stacks import Dumps, Family, Frame, Stacks, stacks_by_py_spy
from tests.conftest import clean_environ
from tests.waiting import wait_until

PROGRAM = """\
import threading, time
from pathlib import Path

def wait():
    Path("ready").touch()
    time.sleep(60)

threading.Thread(target=time.sleep, args=(60,), daemon=True, name="helper").start()
wait()
"""
MAIN = ((6, "wait"), (9, "<module>"))
# A worker process of the program begins later, and its stack is another one.
WITH_WORKER = f"import os\nif os.fork() == 0: import time; time.sleep(60)\n{PROGRAM}"

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def dumps() -> Dumps:
    return Dumps()


@pytest.fixture
def start(dumps: Dumps, tmp_path: Path) -> Iterator[Start]:
    """Starts a command in the directory of the test, and waits until it has created the file `ready`."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*argv: str, **environ: str) -> subprocess.Popen[bytes]:
        env = dumps.environ(clean_environ(environ))
        started.append(subprocess.Popen(argv, cwd=tmp_path, env=env, close_fds=False, start_new_session=True))
        wait_until(lambda: (tmp_path / "ready").exists())
        return started[-1]

    yield run
    for process in started:
        os.killpg(process.pid, 9)
        process.wait()


def places(stacks: Stacks | None) -> tuple[tuple[int, str], ...]:
    """The lines and functions of the main thread."""
    assert stacks is not None
    return tuple((frame.line, frame.function) for frame in stacks.main)


def test_faulthandler_writes_the_stacks_of_all_threads_as_often_as_it_is_asked(
    start: Start, dumps: Dumps, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    process = start(sys.executable, "program.py")
    for _ in range(2):
        stacks = dumps.stacks(Family.of(process.pid))
        assert places(stacks) == MAIN
        assert stacks is not None
        assert stacks.main[0].file.endswith("program.py")
        assert stacks.text.count("most recent call first") == 2
    assert process.poll() is None


def test_py_spy_reads_the_stacks_of_all_threads(start: Start, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    process = start(sys.executable, "program.py")
    stacks = stacks_by_py_spy(Family.of(process.pid), os.environ)
    assert places(stacks) == MAIN
    assert stacks is not None
    assert stacks.main[0] == Frame(str(tmp_path / "program.py"), 6, "wait")
    assert "MainThread (most recent call first)" in stacks.text
    assert "helper (most recent call first)" in stacks.text


@pytest.mark.parametrize("tool", ["py-spy", "faulthandler"])
def test_the_topmost_python_of_a_shell_script_is_the_program(
    start: Start, dumps: Dumps, tmp_path: Path, tool: str
) -> None:
    (tmp_path / "program.py").write_text(WITH_WORKER)
    process = start("sh", "-c", f"{sys.executable} program.py; true")
    family = Family.of(process.pid)
    wait_until(lambda: len(Family.of(process.pid).pids) == 3)
    stacks = dumps.stacks(family) if tool == "faulthandler" else stacks_by_py_spy(family, os.environ)
    assert places(stacks) == tuple((line + 2, function) for line, function in MAIN)


@pytest.mark.parametrize(
    "command",
    [
        ("sh", "-c", "touch ready; sleep 60; true"),
        (sys.executable, "-I", "program.py"),
        (sys.executable, "program.py", "closed"),
    ],
    ids=["another program", "a Python without PYTHONPATH", "a program that has closed the file"],
)
def test_a_program_that_has_not_registered_the_signal_does_not_get_it(
    start: Start, dumps: Dumps, tmp_path: Path, command: tuple[str, ...]
) -> None:
    closing = "import os, sys\nif sys.argv[1:]: os.closerange(3, 4096)\n"
    (tmp_path / "program.py").write_text(closing + PROGRAM)
    process = start(*command)
    assert dumps.stacks(Family.of(process.pid)) is None
    assert process.poll() is None


def test_without_permission_py_spy_returns_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    process = start(sys.executable, "program.py")
    tool = tmp_path / "py-spy"
    tool.write_text("#!/bin/sh\necho 'Error: Permission Denied' >&2\nexit 1\n")
    tool.chmod(0o755)
    assert stacks_by_py_spy(Family.of(process.pid), {"PATH": str(tmp_path)}) is None


def test_the_environment_of_the_program_is_as_without_the_signal(start: Start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['CUSTOMIZED'] = 'yes'\n")
    (tmp_path / "program.py").write_text(
        "import os, sys\nfrom pathlib import Path\nimport sitecustomize\n"
        "Path('seen').write_text(repr((os.environ['PYTHONPATH'], os.environ['CUSTOMIZED'],"
        " [p for p in sys.path if 'at_python_start' in p], 'DDP_HPC_STACKS' in os.environ,"
        " sitecustomize.__file__)))\n" + PROGRAM
    )
    start(sys.executable, "program.py", PYTHONPATH=str(tmp_path))
    own = str(tmp_path / "sitecustomize.py")
    assert (tmp_path / "seen").read_text() == repr((str(tmp_path), "yes", [], False, own))


def test_an_error_of_the_own_sitecustomize_is_printed_as_by_python(start: Start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import missing_module\n")
    (tmp_path / "program.py").write_text(
        "import subprocess, sys\nfrom pathlib import Path\n"
        "Path('alone').write_text(subprocess.run([sys.executable, '-c', ''], stderr=-1, text=True).stderr)\n"
        + PROGRAM
    )
    (tmp_path / "run.sh").write_text(f"exec {sys.executable} program.py 2> seen\n")
    start("sh", "run.sh", PYTHONPATH=str(tmp_path))
    seen = (tmp_path / "seen").read_text()
    assert "No module named 'missing_module'" in seen
    assert seen == (tmp_path / "alone").read_text()


def test_cpu_time_includes_that_of_processes_that_have_ended(start: Start, tmp_path: Path) -> None:
    burn = "import time; e = time.process_time() + 0.3\nwhile time.process_time() < e: pass"
    process = start("sh", "-c", f"{sys.executable} -c '{burn}'; touch ready; sleep 60; true")
    assert Family.of(process.pid).cpu_s() >= 0.3
