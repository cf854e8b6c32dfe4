"""After the launcher has ended, its orphans are ended and reaped, and no other children."""

from __future__ import annotations

import subprocess
import sys

# The child that has ended is that of another thread, which has not asked for its exit code yet.
PROGRAM = """
import os, subprocess, sys, threading, time
from ddp_hpc.base import process_control
from ddp_hpc.schedulers import run_command
from ddp_hpc.supervisor.launcher_process import _end_orphans

process_control.adopt_orphans()
query = subprocess.Popen(["bash", "-c", "exit 3"])
answers = []
ask = ["bash", "-c", "sleep 1; exit 4"]
running = threading.Thread(target=lambda: answers.append(run_command.run(ask, 30.0)))
running.start()
orphans = subprocess.run(["bash", "-c", "sleep 600 >&- & echo $!"], stdout=subprocess.PIPE, text=True)
while process_control.is_running(query.pid) or not run_command.running():
    time.sleep(0.01)
_end_orphans(0.0, ())
pid = int(orphans.stdout)
running.join()
print(query.wait(), answers[0].code, os.path.exists(f"/proc/{pid}"))
"""


def test_queries_to_the_scheduler_are_not_ended_and_their_exit_codes_are_not_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["3", "4", "False"], done.stderr
