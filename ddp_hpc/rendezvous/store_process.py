"""The process with the ranks' store, which rank 0 starts."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

from ddp_hpc.base.errors import RendezvousError

_PROGRAM = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
    "from ddp_hpc.rendezvous.store_server import main; main()"
)


class StoreProcess:
    """A process with a store. It ends soon after `close`, or after the end of the process that created it.

    The server inherits the listening socket, so no other program can take the port meanwhile. `num_clients`
    is the number of clients that may connect at once.

    Raises:
        RendezvousError: the server cannot be started.
    """

    def __init__(self, listener: socket.socket, key: bytes, num_clients: int = 0) -> None:
        descriptor = str(listener.fileno())
        try:
            with listener:
                self._process = subprocess.Popen(
                    # -S and -P: site-packages would slow down the start, and a module in this directory could
                    # hide one of Python's modules.
                    [sys.executable, "-S", "-P", "-c", _PROGRAM, descriptor, str(num_clients)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                    cwd="/",
                )
            assert self._process.stdin is not None
            self._process.stdin.write(key)
            self._process.stdin.flush()
        except OSError as error:
            raise RendezvousError(f"the ranks' store cannot be started on {socket.gethostname()}") from error

    def close(self) -> None:
        """Makes the server end once the other ranks have disconnected. Does not wait; never raises."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        # The server may keep serving other ranks for a moment. If it has not ended yet, the subprocess module
        # reaps it when this process starts another one.
        self._process.poll()
