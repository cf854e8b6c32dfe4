"""Prints errors that occur before the rendezvous once per node: usually all ranks have the same error."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import struct
import sys
import time

from ddp_hpc.base.job_variables import job_id_of
from ddp_hpc.discovery.launcher_environment import Environ, peek_rank, present_launchers

_HEAD_START_S = 1.0  # rank 0 prints first if possible
_LINGER_S = 2.0
_BIND_TO_LISTEN_S = 0.2
_MAX_RANKS = 4096  # maximum number of simultaneous connections


def print_once_per_node(text: str, environ: Environ) -> None:
    """Writes a line to stderr, unless another rank of this launch on this node has just written the same
    line.

    Texts that differ only in numbers, such as the rank, count as the same. The first rank binds an abstract
    socket whose name is derived from the text. Such a socket does not require a file, but it disappears when
    its process exits, so this function waits for `_LINGER_S`. Other users can bind the same name, so the
    owner is checked.
    """
    if not present_launchers(environ):
        _write(text)
        return
    if peek_rank(environ) != 0:
        time.sleep(_HEAD_START_S)
    # With --rank-logs, each rank has a parent of its own.
    variables = ("SLURM_STEP_ID", "PALS_APID", "DDP_HPC_LAUNCH")
    launch = next((environ[name] for name in variables if environ.get(name)), str(os.getppid()))
    kind = hashlib.sha256(re.sub(r"\d+", "#", text).encode()).hexdigest()[:16]
    name = f"\0ddp-hpc-{os.getuid()}-{job_id_of(environ)}-{launch}-{kind}"
    with socket.socket(socket.AF_UNIX) as marker:
        try:
            marker.bind(name)
            marker.listen(_MAX_RANKS)
        except OSError as error:
            # If the socket cannot be created, the message is printed: a repeated message does no harm.
            if error.errno == errno.EADDRINUSE and _is_own(name):
                return
        _write(text)
        time.sleep(_LINGER_S)


def _is_own(name: str) -> bool:
    """Returns whether a process of this user listens under that name (unix(7), SO_PEERCRED)."""
    end_s = time.monotonic() + _BIND_TO_LISTEN_S
    while time.monotonic() < end_s:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_BIND_TO_LISTEN_S)
            try:
                probe.connect(name)
                ids = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            except OSError:
                time.sleep(0.01)  # the other rank may not have called listen() yet
            else:
                return bool(struct.unpack("3i", ids)[1] == os.geteuid())
    return False


def _write(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
