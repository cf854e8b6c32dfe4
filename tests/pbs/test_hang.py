"""A hang under PBS: ranks that ignore SIGTERM on another node do not run beside those of the next start.

With the stand-in for PBS and the real mpiexec of MPICH; PBS itself does not know ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nodes import Nodes
from tests.fakes.site import program
from tests.pbs.conftest import MakeSite
from tests.pbs.jobs import render

MPICH = Path(sys.prefix) / "bin" / "mpiexec"
# In the first attempt, rank 1 hangs after the first checkpoint and ignores SIGTERM. In the second one, no
# process of the first may be left.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path

rank = os.environ["RANK"]
mine = Path(f"pid-{rank}")
if not mine.exists():
    mine.write_text(str(os.getpid()))
    if rank == "0":
        Path(os.environ["DDP_HPC_PROGRESS_FILE"]).write_text("1")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
pid = int(mine.read_text())
try:
    # A process that has ended is in state Z until its parent, or init, has asked for its exit code.
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
except (FileNotFoundError, ProcessLookupError):
    state = "X"
if state not in "ZX":
    print(f"rank {rank} of the first attempt still runs: {state}", flush=True)
    sys.exit(1)
print(f"rank {rank} is done", flush=True)
"""
# An mpiexec that does not end after SIGTERM, and whose ranks run outside of the job, as on another node: the
# test starts them.
MPIEXEC = """#!{python}
import json, os, signal, sys, time
from pathlib import Path

if "--version" in sys.argv:  # its output is read through a pipe
    os.execv("{mpiexec}", sys.argv)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
request = Path("{requests}") / str(os.getpid())
log = os.readlink("/proc/self/fd/1")
new = request.with_suffix(".new")
new.write_text(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "log": log}}))
new.rename(request)
while not (code := request.with_suffix(".code")).exists():
    time.sleep(0.1)
sys.exit(int(code.read_text()))
"""


class Elsewhere:
    """Runs mpiexec for the jobs, outside of their processes."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._has_ended = directory, threading.Event()
        self._started: dict[Path, subprocess.Popen[bytes]] = {}
        directory.mkdir()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._has_ended.wait(0.1):
            for request in self._directory.iterdir():
                if not request.suffix and request not in self._started:
                    asked = json.loads(request.read_text())
                    argv = [str(MPICH), *asked["argv"]]
                    with Path(asked["log"]).open("ab") as log:
                        self._started[request] = subprocess.Popen(
                            argv, env=asked["env"], cwd=asked["cwd"], stdout=log, stderr=log
                        )
            for request, process in self._started.items():
                if process.poll() is not None:
                    new = request.with_suffix(".made")
                    new.write_text(str(process.returncode))
                    new.rename(request.with_suffix(".code"))

    def close(self) -> None:
        self._has_ended.set()
        self._thread.join()
        for process in self._started.values():
            process.kill()
            process.wait(10)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """The directory with the requests of the mpiexec of the jobs."""
    served = Elsewhere(tmp_path / "requests")
    yield tmp_path / "requests"
    served.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Two nodes."""
    made = Nodes(tmp_path, 2)
    yield made
    made.close()


@pytest.mark.check
def test_ranks_of_a_killed_launcher_are_ended_before_the_next_start(
    make_site: MakeSite, nodes: Nodes, elsewhere: Path
) -> None:
    site = make_site(nodes=nodes.names)
    site.dotfile(site.pbs_bin)
    text = MPIEXEC.format(python=sys.executable, requests=elsewhere, mpiexec=MPICH)
    program(site.pbs_bin / "mpiexec", text)
    (site.work / "program.py").write_text(PROGRAM)
    options = ["--nodes", "2", "--ranks-per-node", "1", "--walltime", "00:10:00", *nodes.options]
    options += ["--idle-timeout", "6", "--restarts", "2"]
    job = site.wait(
        site.submit(render(site, "generic_pbs", *options, command=["python", "program.py"])), timeout_s=180
    )
    log = site.log(job)
    assert "still runs" not in log
    assert (job["Exit_status"], log.count("is done")) == (0, 2), log
