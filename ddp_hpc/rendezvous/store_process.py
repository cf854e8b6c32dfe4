"""The servers that a rank starts: the ranks' store, and the TCPStore server of its node."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

from ddp_hpc.base.errors import RendezvousError
from ddp_hpc.rendezvous.store_client import StoreClient


class ServerProcess:
    """A process with a server. It ends soon after `close`, or after the end of the process that created it.

    The server inherits the listening socket, so no other program can take the port meanwhile.

    Raises:
        RendezvousError: the server cannot be started.
    """

    def __init__(self, listener: socket.socket, key: bytes, module: str, *words: str) -> None:
        main = f"from ddp_hpc.rendezvous.{module} import main; main()"
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); {main}"
        try:
            with listener:
                self._process = subprocess.Popen(
                    # -S and -P: site-packages would slow down the start, and a module in this directory could
                    # hide one of Python's modules.
                    [sys.executable, "-S", "-P", "-c", code, str(listener.fileno()), *words],
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
                f"a server for the ranks cannot be started on {socket.gethostname()}"
            ) from error

    def close(self) -> None:
        """Makes the server end once the other ranks have disconnected. Does not wait; never raises."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        # The server may keep serving other ranks for a moment. If it has not ended yet, the subprocess module
        # reaps it when this process starts another one.
        self._process.poll()


class StoreProcess(ServerProcess):
    """The server of the store.

    `will` is a key and the value that the server sets if this process ends without `StoreClient.goodbye`.
    `num_clients` is the number of clients that may connect at once.
    """

    def __init__(
        self, listener: socket.socket, key: bytes, will: tuple[str, str], num_clients: int = 0
    ) -> None:
        super().__init__(listener, key, "store_server", str(num_clients), *will)


class TorchStoreProcess(ServerProcess):
    """The server for the TCPStore clients of this node. `torch_version` is their version, for messages.

    The server has its own connection to `store`.
    """

    def __init__(self, listener: socket.socket, store: StoreClient, torch_version: str) -> None:
        words = torch_version, store.host, str(store.port)
        super().__init__(listener, store.key, "torch_store_server", *words)
