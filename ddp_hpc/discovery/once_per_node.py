"""One voice a node, for ranks that have not met: an error before the rendezvous is most often everybody's."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import struct
import sys
import time

from ddp_hpc.discovery.launcher_environment import Environ, peek_rank, present_launchers

_HEAD_START_S = 1.0  # for rank 0, whose words are preferred
_LINGER_S = 2.0
_BIND_TO_LISTEN_S = 0.2
_MOST_RANKS = 4096  # that may ask at once


def say_once_a_node(text: str, environ: Environ) -> None:
    """Writes a line to stderr, unless another rank of this launch on this node has just said the same.

    Two texts that differ in numbers alone (each names its own rank) count as the
    same. The first rank marks its word with an abstract socket, which needs no
    file and vanishes with the process, and so lingers a moment. Any user of the
    node can open a socket of that name: the kernel is asked whose it is.
    """
    if not present_launchers(environ):
        _write(text)
        return
    if peek_rank(environ) != 0:
        time.sleep(_HEAD_START_S)
    launch = environ.get("SLURM_STEP_ID") or environ.get("PALS_APID") or str(os.getppid())
    kind = hashlib.sha256(re.sub(r"\d+", "#", text).encode()).hexdigest()[:16]
    name = f"\0ddp-hpc-{os.getuid()}-{environ.get('SLURM_JOB_ID', '')}-{launch}-{kind}"
    with socket.socket(socket.AF_UNIX) as mark:
        try:
            mark.bind(name)
            mark.listen(_MOST_RANKS)
        except OSError as error:
            # Whatever else is wrong with the mark must not swallow the error.
            if error.errno == errno.EADDRINUSE and _is_own(name):
                return
        _write(text)
        time.sleep(_LINGER_S)


def _is_own(name: str) -> bool:
    """Whether a process of this user listens under that name (unix(7), SO_PEERCRED)."""
    end_s = time.monotonic() + _BIND_TO_LISTEN_S
    while time.monotonic() < end_s:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_BIND_TO_LISTEN_S)
            try:
                asking.connect(name)
                ids = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            except OSError:
                time.sleep(0.01)  # it may be about to listen
            else:
                return bool(struct.unpack("3i", ids)[1] == os.geteuid())
    return False


def _write(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
