"""The heartbeat of every rank, which identifies a hung rank with its node, step and line of code.

Every rank reports to rank 0 over a separate TCP connection with time limits, because a call to
torch's store would wait forever if the network fails. The training loop sets its position with
`Heartbeat.at`, which only stores a tuple; a thread sends it every few seconds.
"""

from __future__ import annotations

import json
import math
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.errors import RendezvousError
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.discovery.rank_communication import Comm, first_text
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.keepalive import is_cut_off, let_kernel_watch, node_answers
from ddp_hpc.rendezvous.listener import open_listener
from ddp_hpc.training.health.heartbeat_messages import (
    NOT_BEGUN,
    Beat,
    Limits,
    rank_0_cut_off_text,
    rank_0_gone_text,
    rank_0_mute_text,
)
from ddp_hpc.training.health.heartbeat_monitor import (
    GOODBYE_S,
    HeartbeatThread,
    Monitor,
)
from ddp_hpc.training.health.stack_traces import stack_of_this_process
from ddp_hpc.training.process_group.flight_recorder import write_flight_record
from ddp_hpc.training.process_group.start_phases import START_PHASES, STARTING, UNCONNECTED

# Phases in the order of a step; `data` to `backward` repeat for each micro-batch. A phase that is not
# in this list counts as the last one.
PHASES = ("data", "forward", "backward", "optimizer", "exchange", "snapshot", "evaluation")
RESTING = "outside of a step"
"""The phase of a script between two loops. This phase comes after all other phases, and has no time limit."""
_ORDER = {phase: number for number, phase in enumerate((*START_PHASES, *PHASES), start=1)}
_CONNECT_S = 20.0
_CLOSE_S = 3.0
_ANSWER_S = 5.0
# Maximum number of beats per second of all ranks together. A beat takes 0.1 ms of CPU time on rank 0
# (measured with 1000 connections).
_BEATS_PER_S = 50


def start_heartbeat(
    world: World,
    comm: Comm,
    host: str,
    listen: str,
    *,
    hang_s: float,
    first_s: float,
    stacks: Path | None,
    on_lost: Callable[[AttemptEnd], None],
    connect_s: float = 300.0,
    silent_s: float = 60.0,
    gone_s: float = 10.0,
) -> Heartbeat:
    """Starts a heartbeat, which runs until it is closed. Collective: every rank must call this.

    Args:
        world: the rank of this process and the world size.
        comm: the connection over which rank 0 sends its port to the other ranks.
        host: rank 0's address, as used for the store.
        listen: the address on which rank 0 listens; empty: all of its addresses.
        hang_s: time limit for the main thread at one position after the first step.
        first_s: time limit for the main thread at one position before and during the first step.
        stacks: the directory for files with stack traces, such as `rank00003.txt`; None: none are written.
        on_lost: called in the heartbeat's thread with the end of the attempt. Rank 0 detects
            the loss of any other rank; the others detect only the loss of rank 0. The function should end
            the process; if it returns, this heartbeat stops. On ranks other than 0, the function must not
            use the store, which may hang.
        connect_s: time limit for the main thread at one position until the process group is connected.
        silent_s: time limit for a rank's node to answer rank 0's node, and vice versa. If the node answers
            but the process is silent, the time limit is `hang_s`, because a read from a hanging file
            system may block Python for minutes.
        gone_s: after a connection has closed, how long to wait for a rank to report a more specific error.

    If a rank cannot reach rank 0's port, `note` gives the reason and there is no heartbeat.
    """
    limits = _limits(world.world_size, hang_s, first_s, connect_s, silent_s, gone_s)
    heartbeat = Heartbeat(limits)
    if world.world_size == 1:
        monitor = Monitor(world, limits, heartbeat.now, None, stacks, on_lost)
        heartbeat.start_thread(monitor)
        monitor.begin()
        return heartbeat
    listener, problem = _open_listener(listen) if world.rank == 0 else (None, "")
    own_port = 0 if listener is None else listener.getsockname()[1]
    port, nonce, host_of_rank_0 = comm.bcast([str(own_port), secrets.token_hex(8), world.hostname])
    if listener is not None:
        heartbeat.start_thread(Monitor(world, limits, heartbeat.now, (listener, nonce), stacks, on_lost))
    elif port != "0":
        try:
            connection = _connect(world, host, int(port), nonce, silent_s)
            sender = _BeatSender(connection, world.rank, host_of_rank_0, limits, heartbeat.now, on_lost)
            heartbeat.start_thread(sender)
        except (OSError, UnicodeError) as error:
            problem = f"rank {world.rank} on {world.hostname}: {error}"
    _begin_or_give_up(heartbeat, comm, problem, f"port {port} on {host}")
    return heartbeat


def _limits(
    world_size: int, hang_s: float, first_s: float, connect_s: float, silent_s: float, gone_s: float
) -> Limits:
    return Limits(
        silent_s=silent_s,
        hang_s=hang_s,
        first_s=first_s,
        connect_s=connect_s,
        gone_s=gone_s,
        period_s=min(max(2.0, world_size / _BEATS_PER_S), hang_s / 4, connect_s / 4),
        answer_s=min(_ANSWER_S, hang_s),
    )


def _open_listener(address: str) -> tuple[socket.socket | None, str]:
    """Returns rank 0's listening socket, or None and the reason why it could not be opened."""
    try:
        return open_listener([0], address), ""
    except RendezvousError as error:
        return None, f"rank 0: {error}"


def _connect(world: World, host: str, port: int, nonce: str, silent_s: float) -> socket.socket:
    """Returns a connection to rank 0's monitor, on which this rank has identified itself."""
    connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    let_kernel_watch(connection, silent_s)
    connection.sendall(f"hello {nonce} {world.rank} {world.hostname}\n".encode())
    return connection


def _begin_or_give_up(heartbeat: Heartbeat, comm: Comm, problem: str, address: str) -> None:
    """Starts monitoring if all ranks could connect; otherwise, ends the heartbeat. Collective."""
    if note := comm.combine(problem, lambda problems: _note(problems, address)):
        heartbeat.close()
        heartbeat.thread, heartbeat.note = None, note
    elif isinstance(heartbeat.thread, Monitor):
        heartbeat.thread.begin()


def _note(problems: list[str], address: str) -> str:
    if not any(problems):
        return ""
    return (
        f"no heartbeat, so hangs will not be detected: {sum(map(bool, problems))} of {len(problems)} "
        f"ranks cannot reach {address} ({first_text(problems)})"
    )


class Heartbeat:
    """Reports this process's position in the training to rank 0. Created by `start_heartbeat`."""

    def __init__(self, limits: Limits) -> None:
        self.note = ""  # a message for the user if there is no heartbeat
        self.thread: HeartbeatThread | None = None
        self._limits = limits
        self._first_step = NOT_BEGUN
        self._place = (NOT_BEGUN, 0, 0, STARTING, time.monotonic())

    def at(self, step: int, phase: str) -> None:
        """Sets the main thread's position. Call it again if a phase takes minutes."""
        order = _ORDER.get(phase, len(_ORDER) + 1)
        old_limit_s = self._limit_s()
        old_step, turn, old_order, _, _ = self._place
        if step != old_step:
            turn = 0
            if old_step == NOT_BEGUN:
                self._first_step = step
        elif order < old_order:
            turn += 1
        # A single assignment, so that the thread never sees a partial update.
        self._place = (step, turn, order, phase, time.monotonic())
        # Rank 0 applies the limit of the last beat to a process that stops before it sends another one.
        if self.thread is not None and self._limit_s() < old_limit_s:
            self.thread.beat_now()

    def prepare(self, phase: str) -> None:
        """Sets the main thread's position before the first step to one of `START_PHASES`."""
        self.at(NOT_BEGUN, phase)
        if self.thread is not None:
            self.thread.beat_now()  # these phases can be shorter than the interval between two beats

    def rest(self) -> None:
        """Suspends the time limit of the main thread until the next call of `at`."""
        self.at(self._place[0], RESTING)

    def now(self, not_before_s: float = 0.0) -> Beat:
        """Returns the current beat: position, time spent there, and its limit.

        Time before `not_before_s`, on the monotonic clock, is not counted.
        """
        step, turn, order, phase, since_s = self._place
        for_s = time.monotonic() - max(since_s, not_before_s)
        return Beat(step, turn, order, for_s, self._limit_s(), phase)

    def _limit_s(self) -> float:
        step, _, _, phase, _ = self._place
        if phase == RESTING:
            return math.inf
        if phase in UNCONNECTED:
            return self._limits.connect_s
        is_first = step in (NOT_BEGUN, self._first_step)
        return self._limits.first_s if is_first else self._limits.hang_s

    def gone_ranks(self, wait_s: float = 1.0) -> str:
        """Lists the ranks whose connection closed without a goodbye, as in `rank 3 on n2`; empty if none did.

        A rank calls this method if it knows only that some peer has closed its connection. Rank 0's kernel
        detects the exit at about the same time, so this method waits up to `wait_s`.
        """
        if self.thread is None:
            return ""
        self.thread.gone_event.wait(wait_s)
        return self.thread.gone

    def close(self) -> None:
        """Says goodbye to rank 0, which then no longer monitors this rank. Not collective; never raises."""
        if self.thread is None:
            return
        self.thread.stop()
        if self.thread.thread is not threading.current_thread():
            self.thread.thread.join(_CLOSE_S)

    def start_thread(self, thread: HeartbeatThread) -> None:
        """Starts the thread that reports for this process."""
        self.thread = thread
        thread.thread.start()


class _BeatSender(HeartbeatThread):
    """The heartbeat thread of every rank except 0. It sends beats, and detects if rank 0 does not answer."""

    def __init__(
        self,
        connection: socket.socket,
        rank: int,
        host: str,
        limits: Limits,
        now: Callable[[float], Beat],
        on_lost: Callable[[AttemptEnd], None],
    ) -> None:
        super().__init__()
        self._connection, self._rank, self._host = connection, rank, host
        self._limits, self._now, self._on_lost = limits, now, on_lost
        self._buffer, self._cut_off = b"", False
        self._heard_s = time.monotonic()
        self._has_beaten = threading.Event()

    def beat_now(self) -> None:
        self._has_beaten.clear()
        self._ring()
        self._has_beaten.wait(self._limits.answer_s)

    def _is_beat_requested(self) -> bool:
        with suppress(OSError):
            return bool(self._doorbell.recv(64))
        return False

    def _run(self) -> None:
        with self._doorbell, self._bell, selectors.DefaultSelector() as selector:
            self._connection.settimeout(self._limits.answer_s)
            self._doorbell.setblocking(False)
            selector.register(self._connection, selectors.EVENT_READ)
            selector.register(self._doorbell, selectors.EVENT_READ)
            if text := self._beat_until_lost(selector):
                self._on_lost(
                    AttemptEnd(
                        cause=Cause.LOST_RANK,
                        exit_code=Cause.LOST_RANK.exit_code,
                        reason=text,
                        rank=0,
                        host=self._host,
                        silent_s=time.monotonic() - self._heard_s,
                    )
                )
            self._send("bye")
            # Closing with unread data would reset the connection and lose the last message.
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)
                self._connection.settimeout(GOODBYE_S)
                while self._connection.recv(65536):
                    pass
            self._connection.close()

    def _beat_until_lost(self, selector: selectors.BaseSelector) -> str:
        """Sends beats, and returns the reason why rank 0 is lost; empty if this rank or rank 0 said
        goodbye.
        """
        limits, next_s = self._limits, 0.0
        self._heard_s = resumed_s = before_s = time.monotonic()
        while not self._stopped.is_set():
            now = time.monotonic()
            if now - before_s > limits.gap_s:
                # This process was suspended and resumed, so do not count the time in between.
                self._heard_s = resumed_s = now
            before_s = now
            is_requested = self._is_beat_requested()
            beat = self._now(resumed_s)
            if is_requested or now >= next_s:
                self._send(beat.line())
                next_s = now + limits.period_s
            if is_requested:
                self._has_beaten.set()
            if now - self._heard_s > beat.limit_s:
                silence_s = now - self._heard_s
                answers = node_answers(self._connection, within_s=silence_s / 2)
                return rank_0_mute_text(self._host, silence_s, answers, beat)
            ready = selector.select(max(next_s - time.monotonic(), 0.0))
            if any(key.fileobj is self._connection for key, _ in ready):
                try:
                    received = self._connection.recv(65536)
                except OSError as error:
                    self._cut_off = self._cut_off or is_cut_off(error)
                    received = b""
                if received or not self._cut_off:  # if rank 0 has exited, its kernel says so at once
                    self._heard_s = time.monotonic()
                if not received:
                    return self._on_closed()
                if self._receive(received):
                    return ""
                # An answer with the stacks of this process can take seconds, in which it does not listen.
                self._heard_s = before_s = time.monotonic()
        return ""

    def _receive(self, received: bytes) -> bool:
        """Executes rank 0's requests; returns whether it said goodbye."""
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        requests = [line.decode("utf-8", "replace") for line in lines]
        for request in requests:
            if request == "stack":
                stack = stack_of_this_process()
                self._send(f"stack {json.dumps([stack.where, stack.text])}")
                write_flight_record(self._rank, self._limits.answer_s)
                self._send("dumped")
            elif request.startswith("gone "):
                self.set_gone(request.removeprefix("gone "))
        return "bye" in requests

    def _on_closed(self) -> str:
        self.set_gone(f"rank 0 on {self._host}")
        if self._cut_off:
            return rank_0_cut_off_text(self._host, self._limits.silent_s)
        # Wait, because another rank may know why rank 0 exited, and report the cause.
        return "" if self._stopped.wait(self._limits.gone_s) else rank_0_gone_text(self._host)

    def _send(self, line: str) -> None:
        try:
            self._connection.sendall(f"{line}\n".encode())
        except OSError as error:  # keep the error, because the kernel reports it only once
            self._cut_off = self._cut_off or is_cut_off(error)
