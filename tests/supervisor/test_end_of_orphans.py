"""After the launcher has ended, its orphans are ended and reaped, and no other children."""

from __future__ import annotations

import subprocess
import sys

# The child that has ended is that of another thread, which has not asked for its exit code yet.
PROGRAM = """
import os, subprocess, sys, time
from ddp_hpc.base import process_control
from ddp_hpc.supervisor.launcher_process import _end_orphans

process_control.adopt_orphans()
query = subprocess.Popen(["bash", "-c", "exit 3"])
orphans = subprocess.run(["bash", "-c", "sleep 600 >&- & echo $!"], stdout=subprocess.PIPE, text=True)
while process_control.is_running(query.pid):
    time.sleep(0.01)
_end_orphans(0.0, ())
pid = int(orphans.stdout)
print(query.wait(), os.path.exists(f"/proc/{pid}"))
"""


def test_the_exit_code_of_a_query_to_the_scheduler_is_not_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["3", "False"], done.stderr
