"""The processes of a job that a test runs, their listening ports, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.conftest import clean_environ


def processes_below(pid: int) -> list[int]:
    """Returns the process IDs of this process and all its descendants."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, new = [], [pid]
    while new:
        found += new
        new = [child for child, parent in parents.items() if parent in new]
    return found


def listening_at(pid: int) -> set[str]:
    """Returns ADDRESS:PORT of each TCP socket on which a process listens."""
    inodes = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    address, port = fields[1].split(":")
                    octets = [str(int(address[i : i + 2], 16)) for i in (6, 4, 2, 0)]
                    host = ".".join(octets) if len(address) == 8 and address != "00000000" else "127.0.0.1"
                    found.add(f"{host}:{int(port, 16)}")
    return found


@contextmanager
def job(argv: list[str], cwd: Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        argv,
        cwd=cwd,
        env=clean_environ(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield started
    finally:
        for pid in processes_below(started.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started.communicate()


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
