"""The heartbeat on rank 0: receives the beats of all ranks and finds the rank that blocks the others.

The monitor is one thread with a selector. A rank sends `hello NONCE RANK HOST`, then a line `at ...`
(`Beat`) every few seconds, `stack JSON` and `dumped` on request, and `bye`. Rank 0
answers each beat with an empty line, and sends `stack`, `gone WHO` and `bye`.
"""

from __future__ import annotations

import hmac
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.in_time import in_time
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.keepalive import is_cut_off, let_kernel_watch, node_answers
from ddp_hpc.training.health.heartbeat_messages import (
    Beat,
    Limits,
    RankStatus,
    cut_off_text,
    end_of_lost,
    gone_text,
    hang_text,
    name_ranks,
)
from ddp_hpc.training.health.stack_traces import stack_of_this_process
from ddp_hpc.training.process_group.flight_recorder import write_flight_record

_GREETING_BYTES = 512
_LINE_BYTES = 1 << 20
_GREETING_S = 5.0
_MAX_UNIDENTIFIED = 512  # open connections without a greeting; the oldest is closed for a new one
_MAX_ANNOUNCED = 8  # lost ranks whose loss is announced to all others
_MAX_FILES = 64
GOODBYE_S = 2.0


@dataclass
class _Rank(RankStatus):
    """The state of one rank. Rank 0 has no connection to itself."""

    connection: _Connection | None = None
    beat_s: float = 0.0
    left: bool = False
    gone_s: float | None = None  # time at which its connection ended without a goodbye
    cut_off: bool = False
    dumped: bool = False


@dataclass(eq=False)
class _Connection:
    """An open connection of a rank, unidentified until it has sent its greeting."""

    socket: socket.socket
    opened_s: float
    cut_off: bool = False
    rank: _Rank | None = None
    buffer: bytearray = field(default_factory=bytearray)

    def send(self, line: str) -> None:
        # Messages to a rank that does not read them are dropped, because its missing beats will be detected.
        try:
            self.socket.send(f"{line}\n".encode())
        except OSError as error:  # the kernel reports an error only once
            self.cut_off = self.cut_off or is_cut_off(error)


class HeartbeatThread:
    """A thread of the heartbeat, which `stop` wakes up."""

    def __init__(self) -> None:
        self._doorbell, self._bell = socket.socketpair()
        self._stopped = threading.Event()
        self.gone = ""  # the ranks whose connection closed without a goodbye
        self.gone_event = threading.Event()  # set if there are such ranks
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def stop(self) -> None:
        """Stops the thread, which sends a goodbye message on all of its connections."""
        self._stopped.set()
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):
            self._bell.send(b"!")

    def beat_now(self) -> None:
        """Sends a beat without waiting for the next interval; returns when the kernel has it."""

    def set_gone(self, names: str) -> None:
        """Sets the ranks whose connection closed without a goodbye."""
        self.gone = names
        self.gone_event.set()

    def _run(self) -> None:
        raise NotImplementedError


class Monitor(HeartbeatThread):
    """The thread of rank 0. It monitors all ranks from `begin` until `stop` or until it finds a lost rank."""

    def __init__(
        self,
        world: World,
        limits: Limits,
        own_beat: Callable[[float], Beat],
        listener_and_nonce: tuple[socket.socket, str] | None,  # the greeting must contain the nonce
        stacks: Path | None,
        on_lost: Callable[[AttemptEnd], None],
    ) -> None:
        super().__init__()
        self._limits, self._own_beat, self._stacks, self._on_lost = limits, own_beat, stacks, on_lost
        self._listener = listener_and_nonce[0] if listener_and_nonce else None
        self._nonce = listener_and_nonce[1] if listener_and_nonce else ""
        initial = Beat(limit_s=limits.first_s)
        self._ranks = [
            _Rank(rank, "an unknown node", initial, beat_s=time.monotonic())
            for rank in range(world.world_size)
        ]
        self._ranks[0].host = world.hostname
        self._connections: set[_Connection] = set()
        self._unidentified: dict[_Connection, None] = {}  # in the order of their arrival
        self._num_gone = 0
        self._begun = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._resumed_s, self._updated_s = 0.0, time.monotonic()

    def begin(self) -> None:
        """Starts monitoring. Call it after all ranks have connected."""
        self._begun.set()

    def _run(self) -> None:
        for waited_for in filter(None, (self._listener, self._doorbell)):
            waited_for.setblocking(False)
            self._selector.register(waited_for, selectors.EVENT_READ)
        try:
            while not self._stopped.is_set():
                self._listen(self._limits.period_s / 2)
                if time.monotonic() < self._updated_s + self._limits.period_s / 2:
                    continue
                self._update()
                if self._begun.is_set() and (end := self._end()):
                    self._on_lost(end)
                    break
        finally:
            self._say_goodbye()
            for own in filter(None, (self._listener, self._doorbell, self._bell)):
                own.close()
            self._selector.close()

    def _say_goodbye(self) -> None:
        """Says goodbye to all ranks, and reads their last messages: unread data would reset a connection."""
        for _ in self._ranks:  # those that have just connected, too
            if all(key.fileobj is not self._listener for key, _ in self._selector.select(0)):
                break
            self._accept()
        for connection in self._connections:
            connection.send("bye")
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)
        for rank in self._ranks:
            rank.left = True
        end_s = time.monotonic() + GOODBYE_S
        while self._connections and time.monotonic() < end_s:
            self._listen(0.05)
        for connection in list(self._connections):
            self._close(connection)

    def _listen(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Connection):
                self._read(key.data)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
            accepted.setblocking(False)
            let_kernel_watch(accepted, self._limits.silent_s)
        except OSError:
            time.sleep(0.05)  # possibly out of file descriptors; unidentified connections are closed soon
            return
        if len(self._unidentified) >= max(_MAX_UNIDENTIFIED, 2 * len(self._ranks)):
            self._close(next(iter(self._unidentified)))
        connection = _Connection(accepted, time.monotonic())
        self._connections.add(connection)
        self._unidentified[connection] = None
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            received = connection.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            connection.cut_off = connection.cut_off or is_cut_off(error)
            received = b""
        connection.buffer += received
        try:
            while b"\n" in connection.buffer:
                line, _, connection.buffer = connection.buffer.partition(b"\n")
                self._receive(connection, line.decode())
            room = _GREETING_BYTES if connection.rank is None else _LINE_BYTES
            if not received or len(connection.buffer) > room:
                self._on_closed(connection)
        except ValueError:
            self._on_closed(connection)  # the connection is not from a rank of this program

    def _receive(self, connection: _Connection, line: str) -> None:
        rank = connection.rank
        if rank is None:
            self._identify(connection, line)
            return
        word, _, rest = line.partition(" ")
        if word == "at":
            rank.beat, rank.beat_s = Beat.parse(rest), time.monotonic()
            connection.send("")
        elif word == "stack":
            rank.where, rank.stack = map(str, json.loads(rest))
        elif word == "dumped":
            rank.dumped = True
        elif word == "bye":
            rank.left = True

    def _identify(self, connection: _Connection, line: str) -> None:
        word, nonce, number, host = line.split()
        known = word == "hello" and hmac.compare_digest(nonce.encode(), self._nonce.encode())
        if not known or not 0 < int(number) < len(self._ranks) or self._ranks[int(number)].connection:
            raise ValueError("not a rank of this job")
        rank = connection.rank = self._ranks[int(number)]
        rank.connection, rank.host = connection, host
        del self._unidentified[connection]

    def _on_closed(self, connection: _Connection) -> None:
        self._close(connection)
        rank = connection.rank
        if rank is None or rank.left:
            return
        rank.gone_s, rank.cut_off = time.monotonic(), connection.cut_off
        self._num_gone += 1
        if self._num_gone > _MAX_ANNOUNCED:
            return
        self.set_gone(name_ranks([r for r in self._ranks if r.gone_s is not None]))
        for other in self._connections:
            other.send(f"gone {self.gone}")

    def _close(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._unidentified.pop(connection, None)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _update(self) -> None:
        """Closes connections without a greeting, and updates rank 0's own beat."""
        now = time.monotonic()
        for connection in list(self._unidentified):
            if now - connection.opened_s > _GREETING_S:
                self._close(connection)
        if now - self._updated_s > self._limits.gap_s:
            # The process was suspended and resumed, for example with its job: do not count the time in
            # between.
            self._resumed_s = now
        self._updated_s = now
        self._ranks[0].beat, self._ranks[0].beat_s = self._own_beat(self._resumed_s), now

    def _end(self) -> AttemptEnd | None:
        """Returns how the job ends; None if no rank has failed."""
        now, limits = time.monotonic(), self._limits
        gone = [r for r in self._ranks if r.gone_s is not None]
        # The ranks of a node that is cut off are not detected as lost at the same time, so wait for all.
        patience_s = {True: limits.silent_s / 3, False: limits.gone_s}
        if any(now - (r.gone_s or now) > patience_s[r.cut_off] for r in gone):
            cut_off = [r for r in gone if r.cut_off]
            if cut_off:
                silent_s = now - min(r.beat_s for r in cut_off)
                return end_of_lost(Cause.LOST_RANK, cut_off_text(cut_off, limits.silent_s), cut_off, silent_s)
            silent_s = max(now - r.gone_s for r in gone if r.gone_s is not None)
            return end_of_lost(Cause.LOST_RANK, gone_text(gone, limits.gone_s), gone, silent_s)
        if not self._laggards():
            return None
        self._collect_stacks()
        laggards = self._laggards()  # a rank may have made progress in the meantime
        if not laggards:
            return None
        written = _write_stacks(self._stacks, laggards, limits.answer_s) if self._stacks is not None else None
        text = hang_text(laggards, self._active(), written)
        return end_of_lost(Cause.HANG, text, laggards, min(r.for_s for r in laggards))

    def _active(self) -> list[_Rank]:
        return [r for r in self._ranks if not r.left and r.gone_s is None]

    def _laggards(self) -> list[_Rank]:
        """Returns the ranks that are furthest behind, if each has exceeded the time limit at its position.

        As long as one of these ranks makes progress, the others may wait for it. A silent rank is assumed
        to be at its last known position.
        """
        here, now = self._active(), time.monotonic()
        behind = min(r.beat.place for r in here)
        laggards = [r for r in here if r.beat.place == behind]
        for rank in laggards:
            rank.for_s = rank.beat.for_s + now - max(rank.beat_s, self._resumed_s)
        return laggards if all(r.for_s > r.beat.limit_s for r in laggards) else []

    def _collect_stacks(self) -> None:
        """Asks every rank for its stack traces and to write its flight record; waits for the answers."""
        for rank in self._active():
            rank.where = rank.stack = ""
            rank.dumped = rank.connection is None
            if rank.connection is not None:
                rank.connection.send("stack")
        own = stack_of_this_process()
        self._ranks[0].where, self._ranks[0].stack = own.where, own.text
        write_flight_record(0, self._limits.answer_s)
        end_s = time.monotonic() + self._limits.answer_s
        while time.monotonic() < end_s and not all(r.dumped for r in self._active()):
            self._listen(0.05)
        for rank in self._active():
            if rank.connection is not None:
                answers = node_answers(rank.connection.socket, within_s=self._limits.answer_s / 2)
                rank.node_answers = answers is not False
        self._updated_s = time.monotonic()


def _write_stacks(directory: Path, laggards: Iterable[RankStatus], limit_s: float) -> Path | None:
    """Writes the stacks. Returns the file if there is only one, else the directory; None on failure."""
    answered = [rank for rank in laggards if rank.stack][:_MAX_FILES]
    files = {directory / f"rank{rank.rank:05d}.txt": rank.stack for rank in answered}

    def write() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for path, stack in files.items():
            path.write_text(stack, encoding="utf-8")

    if not files or not in_time(write, limit_s):
        return None
    return next(iter(files)) if len(files) == 1 else directory
