"""`mpiexec` with PALS's options, over the real Hydra that lies beside this Python.

Hydra starts `rank.py` for each rank, which turns Hydra's variables into PALS's.
PMI_RANK, PMI_SIZE and PMI_FD stay, also with --pmi=pmix: without them MPI could
not start. All ranks run here; with two hosts in the node file, rank r is on host
r // ppn as far as its variables tell.

As with PALS, the ranks are not in the session of the job: only this process
gets the scheduler's signals, and hands SIGTERM, SIGINT and the like on.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

FOLDER_VARIABLE = "PALS_STAND_IN_HOME"  # set by the installed command
VERSION = "mpiexec version 1.3.2 revision 0"
HYDRA = Path(sys.executable).with_name("mpiexec")
_PR_SET_PDEATHSIG = 1
_HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# Every option of PALS that the stand-in knows, by its spellings; the rest is refused.
_WITH_VALUE = {
    "num_ranks": ("n", "np"),
    "ppn": ("ppn",),
    "depth": ("d", "depth"),
    "cpu_bind": ("cpu-bind",),
    "mem_bind": ("mem-bind",),
    "env": ("env",),
    "hostfile": ("f", "hostfile"),
    "pmi": ("pmi",),
}
_FLAGS = {"envall", "genvall", "l", "label", "line-buffer", "no-vni", "no-transfer", "version"}
_FLAGS |= {"abort-on-failure", "no-abort-on-failure"}
_VALUE_OF = {spelling: name for name, spellings in _WITH_VALUE.items() for spelling in spellings}


class Refused(Exception):
    """One line on stderr and a non-zero end; no rank was started."""


@dataclass
class Line:
    """The command line, taken apart. Bindings are read and not applied."""

    values: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    command: list[str] = field(default_factory=list)

    def number(self, name: str, default: int) -> int:
        text = self.values.get(name, str(default))
        if not text.isdecimal() or int(text) < 1:
            raise Refused(f"invalid argument '{text}' for {name}")
        return int(text)


def read_line(argv: Sequence[str]) -> Line:
    """Options as getopt_long_only takes them: one dash or two, the value after `=` or a blank.

    Raises:
        Refused: for an option that PALS does not have, or one without its value.
    """
    line, words = Line(), list(argv)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        name, equals, value = word.lstrip("-").partition("=")
        if name in _FLAGS and not equals:
            line.flags.add(name)
        elif name in _VALUE_OF:
            if not equals and not words:
                raise Refused(f"option '{word}' requires an argument")
            value = value if equals else words.pop(0)
            if _VALUE_OF[name] == "env":
                variable, _, text = value.partition("=")
                line.env[variable] = text
            line.values[_VALUE_OF[name]] = value
        else:
            raise Refused(f"unrecognized option '{word}'")
    line.command = words
    return line


def hosts(line: Line) -> list[str]:
    """The hosts of the host file or the job's node file, each once, in order.

    Raises:
        Refused: outside a job, or without such a file.
    """
    path = line.values.get("hostfile") or os.environ.get("PBS_NODEFILE")
    if not path:
        raise Refused("no host list: not inside a PBS job, and no --hostfile")
    try:
        return list(dict.fromkeys(Path(path).read_text().split()))
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from error


def launch(line: Line) -> int:
    """Runs the ranks; the largest exit code of those that ended by themselves.

    One rank's non-zero end ends all others, unless --no-abort-on-failure.
    """
    nodes = hosts(line)
    num_ranks = line.number("num_ranks", 1)
    ppn = line.number("ppn", -(-num_ranks // len(nodes)))
    if num_ranks > ppn * len(nodes):
        raise Refused(f"{num_ranks} ranks do not fit on {len(nodes)} nodes with {ppn} each")
    pmi = line.values.get("pmi", "cray")
    if pmi not in ("cray", "pmix"):
        raise Refused(f"invalid argument '{pmi}' for --pmi")
    if not line.command:
        raise Refused("no executable specified")
    apid = str(uuid.uuid4())
    spool = Path(tempfile.mkdtemp(prefix="palsd.", dir=os.environ.pop(FOLDER_VARIABLE)))
    try:
        rank = [sys.executable, "-I", "-S", str(Path(__file__).with_name("rank.py"))]
        rank += [str(ppn), apid, str(line.number("depth", 1)), pmi, str(spool)]
        words = [str(HYDRA), "-launcher", "fork", "-hosts", "localhost", "-n", str(num_ranks)]
        if line.flags & {"l", "label"}:
            words.append("-prepend-rank")
        hydra = subprocess.Popen(
            [*words, *rank, *line.command],
            env={**os.environ, **line.env},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,  # the job's SIGKILL reaches this process alone
        )
        for number in _HANDED_ON:
            signal.signal(number, lambda sent, frame: hydra.send_signal(sent))
        return _watch(hydra, spool, nodes, ppn, stop="no-abort-on-failure" not in line.flags)
    finally:
        shutil.rmtree(spool, ignore_errors=True)


def _watch(hydra: subprocess.Popen[bytes], spool: Path, nodes: list[str], ppn: int, stop: bool) -> int:
    said: set[str] = set()
    codes = {0}
    stop_by_s = float("inf")
    while True:
        over = hydra.poll() is not None
        for file in sorted(spool.glob("rank.*")):
            code = int(file.read_text())
            if code and file.name not in said:
                said.add(file.name)
                rank = int(file.suffix[1:])
                how = f"exited with code {code}" if code > 0 else f"died from signal {-code}"
                sys.stderr.write(f"{nodes[rank // ppn]}: rank {rank} {how}\n")
                if stop_by_s == float("inf"):  # ranks that were ended do not count
                    codes.add(code if code > 0 else 128 - code)
        if over:
            return max(codes) or hydra.returncode % 256
        if stop and said and stop_by_s == float("inf"):
            stop_by_s = time.monotonic() + 5.0
            hydra.send_signal(signal.SIGTERM)
        if time.monotonic() > stop_by_s:
            hydra.kill()
        time.sleep(0.02)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> NoReturn:
    try:
        line = read_line(sys.argv[1:])
        if "version" in line.flags:
            sys.stdout.write(f"{VERSION}\n")
            sys.exit(0)
        sys.exit(launch(line))
    except Refused as error:
        sys.stderr.write(f"mpiexec: {error}\nTry 'mpiexec --help' for more information.\n")
        sys.exit(1)
