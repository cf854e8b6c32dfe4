"""One voice a node, for ranks that have not met: an error before the rendezvous is most often everybody's."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import sys
import time

from ddp_hpc.world.launch_env import Environ, peek_rank, present_launchers

_HEAD_START_S = 1.0  # for rank 0, whose words are preferred
_LINGER_S = 2.0


def say_once_a_node(text: str, environ: Environ) -> None:
    """Writes a line to stderr, unless another rank of this launch on this node has just said the same.

    Two texts that differ in numbers alone (each names its own rank) count as the
    same. The first rank marks its word with an abstract socket, which needs no
    file and vanishes with the process, and so lingers a moment.
    """
    if not present_launchers(environ):
        _write(text)
        return
    if peek_rank(environ) != 0:
        time.sleep(_HEAD_START_S)
    launch = environ.get("SLURM_STEP_ID") or environ.get("PALS_APID") or str(os.getppid())
    kind = hashlib.sha256(re.sub(r"\d+", "#", text).encode()).hexdigest()[:16]
    with socket.socket(socket.AF_UNIX) as mark:
        try:
            mark.bind(f"\0ddp-hpc-{os.getuid()}-{environ.get('SLURM_JOB_ID', '')}-{launch}-{kind}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return  # said already; whatever else is wrong with the mark must not swallow the error
        _write(text)
        time.sleep(_LINGER_S)


def _write(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
