"""Ends the processes of earlier starts of the ranks on this node, which could still write checkpoints.

A launcher that was killed can leave ranks on other nodes. PBS does not know ranks, and so cannot end them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.process_control import Process, processes, send
from ddp_hpc.base.process_status import process_started
from ddp_hpc.discovery.node_check_request import EARLIER_LAUNCHES

_LAUNCH = b"DDP_HPC_LAUNCH="
_LIMIT_S = 10.0


def end_earlier_ranks(environ: Mapping[str, str], limit_s: float = _LIMIT_S) -> str:
    """Kills processes of this user that belong to earlier starts in this job, and waits for their end.

    Returns which process is left; nothing if there is none.
    """
    launches = {_LAUNCH + name.encode() for name in environ.get(EARLIER_LAUNCHES, "").split()}
    end_s = time.monotonic() + limit_s
    while launches and (left := _of_launches(launches)):
        send(signal.SIGKILL, left)
        if time.monotonic() > end_s:
            return f"process {left[0].pid} of an earlier start of the ranks could not be killed"
        time.sleep(0.1)
    return ""


def _of_launches(launches: set[bytes]) -> list[Process]:
    """Returns processes that still execute a program with one of these variables."""
    found = []
    for process in processes():
        with suppress(OSError):  # of another user, or it has just ended
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if launches & {*variables} and process.pid != os.getpid() and process_started(process.pid):
                found.append(process)
    return found
