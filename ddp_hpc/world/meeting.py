"""How ranks meet over TCP before there is a store: rank 0 opens a door, the others knock.

The door's socket is the one that the store takes over later, so its port is
never free for somebody else in between. Where no message can be passed
beforehand, both sides try the same short list of ports, and the key (the job's
and step's id) tells the right door from another job's on the same node.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddp_hpc.errors import RendezvousError

_GREETING = "ddp-hpc-1"
_LINE_LIMIT = 4096
_KNOCK_S = 5.0  # for one connection and its answer
_RETRY_S = 0.2
# Below Linux's ephemeral range (32768 to 60999), from which any program is given ports.
_FIRST_PORT, _NUM_PORTS, _NUM_CANDIDATES = 20000, 12000, 32


def candidate_ports(key: str) -> list[int]:
    """The ports that all ranks of one launch try, in one order. A taken one is passed over, never shared."""
    digest = hashlib.sha256(key.encode()).digest()
    start, step = int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:6], "big") * 2 + 1
    return [_FIRST_PORT + (start + i * step) % _NUM_PORTS for i in range(_NUM_CANDIDATES)]


def open_listener(ports: Sequence[int], loopback_only: bool) -> socket.socket:
    """A listening socket on the first port of the list that is free; 0 lets the kernel choose.

    Raises this process's limit of open files as far as it may: the door, and the
    store after it, hold a few connections for each rank.

    Raises:
        RendezvousError: where none is free.
    """
    _raise_file_limit()
    for port in ports:
        try:
            if loopback_only:
                return socket.create_server(("127.0.0.1", port), backlog=4096)
            if socket.has_dualstack_ipv6():
                with contextlib.suppress(OSError):  # an image without IPv6 has the module, not the address
                    return socket.create_server(
                        ("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
                    )
            return socket.create_server(("", port), backlog=4096)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise RendezvousError(f"cannot listen on port {port} of {socket.gethostname()}") from error
    if len(ports) == 1:
        raise RendezvousError(
            f"port {ports[0]} of {socket.gethostname()} is taken by another program; unset MASTER_PORT and a "
            "free one is found"
        )
    raise RendezvousError(f"none of the ports {ports[0]}, {ports[1]}, ... is free on {socket.gethostname()}")


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass
class Door:
    """Rank 0's side. `serve` answers knocks until everyone expected has come or the time is up."""

    listener: socket.socket
    key: str
    answer: dict[str, str | int]  # what whoever knocks rightly is told
    arrived: dict[int, str] = field(default_factory=dict)  # id -> host name
    _inside: list[socket.socket] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def serve(self, expected: set[int], timeout_s: float) -> set[int]:
        """Answers knocks; returns the ids that did not come in time."""
        end = time.monotonic() + timeout_s
        self.listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            while not expected <= self.arrived.keys() and not self._stop.is_set():
                if time.monotonic() > end:
                    break
                for chosen, _ in selector.select(0.05):
                    if chosen.fileobj is self.listener:
                        self._let_in(selector)
                    else:
                        selector.unregister(chosen.fileobj)
                        assert isinstance(chosen.fileobj, socket.socket)
                        self._reply(chosen.fileobj)
        self.listener.setblocking(True)
        return expected - self.arrived.keys()

    def stop(self) -> None:
        """Ends `serve`, from another thread."""
        self._stop.set()

    def dismiss(self, verdict: str = "go") -> None:
        """Tells all who wait inside to go on, or why not, and closes their connections."""
        for guest in self._inside:
            with contextlib.suppress(OSError), guest:
                guest.sendall(f"{' '.join(verdict.split())[: _LINE_LIMIT - 2]}\n".encode())
        self._inside.clear()

    def _let_in(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            guest, _ = self.listener.accept()
            guest.setblocking(False)
            selector.register(guest, selectors.EVENT_READ)

    def _reply(self, guest: socket.socket) -> None:
        """Answers one knock. A knock is one short line, which arrives in one piece."""
        try:
            words = guest.recv(_LINE_LIMIT).decode("utf-8", "replace").split()
            guest.settimeout(_KNOCK_S)
            if len(words) == 4 and words[0] == _GREETING and words[1] == self.key and words[2].isdecimal():
                guest.sendall(f"welcome {json.dumps(self.answer)}\n".encode())
                self.arrived[int(words[2])] = words[3]
                self._inside.append(guest)
                return
            if words:
                guest.sendall(b"another door\n")
        except OSError:
            pass
        guest.close()


@dataclass(frozen=True)
class Welcome:
    """The other side's answer, and the open connection on which `go` will come."""

    connection: socket.socket
    lines: _Lines
    port: int
    answer: dict[str, str | int]

    def wait_for_go(self, timeout_s: float) -> str:
        """Rank 0's verdict: `go`, or why not; empty where it went away without one."""
        with self.connection:
            try:
                return self.lines.read(timeout_s)
            except OSError:
                return ""


def knock(host: str, ports: Sequence[int], key: str, number: int, timeout_s: float) -> Welcome:
    """Tries the ports in turn, again and again, until the door with this key answers.

    Raises:
        RendezvousError: after `timeout_s`, with the last cause. Until then every cause is taken for
            one that passes: rank 0 may not have started yet.
    """
    end = time.monotonic() + timeout_s
    greeting = f"{_GREETING} {key} {number} {socket.gethostname()}\n".encode()
    causes: dict[int, str] = {}
    while True:
        for port in ports:
            left = end - time.monotonic()
            if left <= 0:
                break
            try:
                return _try_port(host, port, greeting, min(_KNOCK_S, left))
            except (OSError, UnicodeError) as error:
                causes[port] = _plain_cause(error)
        if time.monotonic() + _RETRY_S > end:
            first = causes.get(ports[0], "no answer in time")
            where = f"port {ports[0]}" if len(ports) == 1 else f"any of {len(ports)} ports from {ports[0]} on"
            raise RendezvousError(f"no answer at {host}, {where}, in {timeout_s:g} s: {first}")
        time.sleep(_RETRY_S)


def _try_port(host: str, port: int, greeting: bytes, timeout_s: float) -> Welcome:
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        connection.sendall(greeting)
        lines = _Lines(connection)
        word, _, text = lines.read(timeout_s).partition(" ")
        if word != "welcome":
            raise OSError(f"port {port} belongs to something else")
        return Welcome(connection, lines, port, json.loads(text))
    except ValueError as error:
        connection.close()
        raise OSError(f"port {port} answers in another language") from error
    except BaseException:
        connection.close()
        raise


class _Lines:
    """The lines of a connection, one at a time: welcome and verdict may arrive in one piece."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    def read(self, timeout_s: float) -> str:
        """The next line; TimeoutError where it is not whole in time, however steadily its letters drip in."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self._buffer and len(self._buffer) < _LINE_LIMIT:
            self._connection.settimeout(max(end - time.monotonic(), 0.001))
            piece = self._connection.recv(_LINE_LIMIT)
            if not piece:
                break
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace").strip()


def _plain_cause(error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return "the name does not resolve (a part of it is empty or has more than 63 letters)"
    if isinstance(error, socket.gaierror):
        return f"the name does not resolve ({error.strerror})"
    if isinstance(error, TimeoutError):
        return "no answer in time (a firewall, or another network)"
    return os.strerror(error.errno) if error.errno else str(error)
