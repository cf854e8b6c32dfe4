"""The server process of the ranks' key-value store, started by rank 0."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

from ddp_hpc.errors import RendezvousError

_MAIN = "from ddp_hpc.rendezvous.store_server import main; main()"


class StoreProcess:
    """The server process. It ends soon after `close`, or after the end of the process that created it.

    `will` is a key and the value that the server sets if this process ends without `StoreClient.goodbye`.
    The server inherits the listening socket, so no other program can take the port meanwhile.

    Raises:
        RendezvousError: the server cannot be started.
    """

    def __init__(self, listener: socket.socket, key: bytes, will: tuple[str, str]) -> None:
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); {_MAIN}"
        try:
            with listener:
                self._process = subprocess.Popen(
                    # -S and -P: site-packages would slow down the start, and a module in this directory could
                    # hide one of Python's modules.
                    [sys.executable, "-S", "-P", "-c", code, str(listener.fileno()), *will],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                    cwd="/",
                )
            assert self._process.stdin is not None
            self._process.stdin.write(key)
            self._process.stdin.flush()
        except OSError as error:
            raise RendezvousError(
                f"the store server for the ranks cannot be started on {socket.gethostname()}"
            ) from error

    def close(self) -> None:
        """Makes the server end once the other ranks have disconnected. Does not wait; never raises."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        # The server may keep serving other ranks for a moment. If it has not ended yet, the subprocess module
        # reaps it when this process starts another one.
        self._process.poll()
