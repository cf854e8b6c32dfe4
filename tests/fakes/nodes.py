"""Nodes with addresses of their own on this machine, on which Hydra starts ranks with a remote shell.

A node that dies answers nobody, and closes no connection: its processes are stopped (SIGSTOP), and the kernel
discards connections to its port, because the queue of the socket is full.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

from ddp_hpc.rehearse.install_stand_ins import program
from ddp_hpc.schedulers.pbs.running_job import PbsJob

# As the wrapper of pbs_tmrsh that `ddp-hpc doctor` recommends.
_REMOTE_SHELL = """#!/bin/sh
host=$1; shift; SIMULATED_NODE=$host exec /bin/sh -c "$*"
"""


class Nodes:
    """Nodes whose names are addresses of the loopback network, which no other test uses."""

    def __init__(self, folder: Path, count: int) -> None:
        pid = os.getpid()  # of 22 bits
        network = f"127.{pid >> 14}.{pid >> 6 & 255}"
        self.names = tuple(f"{network}.{(pid & 63) * 4 + index}" for index in range(count))
        shell = program(folder / "remote_shell", _REMOTE_SHELL)
        self.options = ["--env", "HYDRA_LAUNCHER=rsh", "--env", f"HYDRA_LAUNCHER_EXEC={shell}"]
        self._stopped: list[int] = []
        self._sockets: list[socket.socket] = []

    def lose(self, name: str, variable: str = "") -> None:
        """Lets a node die. `variable`, such as PALS_NODEID=1, is in the environment of its processes."""
        full = socket.create_server((name, PbsJob.watched_ports[0]), backlog=0)
        self._sockets += [full, socket.create_connection((name, PbsJob.watched_ports[0]))]
        wanted = (variable or f"SIMULATED_NODE={name}").encode()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted in environ.read_bytes().split(b"\0"):
                    self._stopped.append(int(environ.parent.name))
                    os.kill(self._stopped[-1], signal.SIGSTOP)

    def close(self) -> None:
        """Ends the processes of the lost nodes."""
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for each in self._sockets:
            each.close()
