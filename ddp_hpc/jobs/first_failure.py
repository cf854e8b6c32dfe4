"""Finds the rank that failed first, its host and its error message at the end of a job's log."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_MAX_LINES = 12
_MAX_CHARS = 300
_NUM_LINES_BEFORE = 3
# A requeued job appends to the same log. Each attempt begins with a line of the supervisor, or with a line of
# the trainer if torchrun has restarted the ranks.
_ATTEMPT_START = re.compile(
    r"^(?:ddp-hpc: job \S{1,300}: |resuming after step [0-9]+ \(epoch )", re.MULTILINE
)
_TRACEBACK = re.compile(r"^.{0,80}?Traceback \(most recent call last\):", re.MULTILINE)
# Messages of ddp_hpc.train: the first rank that fails prints its error, which can name another rank.
_TRAINER = re.compile(r"^\[(?:rank ([0-9]+)(?:/[0-9]+)? )?(\S+)\] (error: .*|Traceback .*)", re.MULTILINE)
_OTHER_RANK = re.compile(r"(?:^error: |lost contact with )rank ([0-9]+) on ([A-Za-z0-9_.-]+)")
# Messages of srun. Tasks that srun ended after the failure of another task are reported as `Terminated`.
_SRUN = re.compile(
    r"^srun: error: ([^\s:]+): tasks? ([0-9]+)[0-9,-]*: (?!Terminated|running)(.*)", re.MULTILINE
)
_NODE = re.compile(r"^srun: error: Node failure on ([^\s,]+)", re.MULTILINE)
# Messages of HPE's mpiexec (PALS), Open MPI, and Hydra, which does not report the rank.
_PALS = re.compile(r"^([A-Za-z0-9_.-]+): rank ([0-9]+) ((?:exited|died) .*)", re.MULTILINE)
_OPEN_MPI = re.compile(r"process rank ([0-9]+) with PID [0-9]+ on node (\S+) exited (.*)")
_HYDRA = re.compile(r"^=   PID [0-9]+ RUNNING AT (\S+)\n=   (EXIT CODE: [0-9]+)", re.MULTILINE)
# The table that torchrun prints.
_TORCHRUN = re.compile(
    r"Root Cause \(first observed failure\):\n\[[0-9]+\]:\n(?:.*\n)??  host +: (\S+)\n  rank +: ([0-9]+) .*\n"
    r"  (exitcode +: .*)"
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure of a job. `rank` is None if only the host is known; `lines` are lines of the log."""

    rank: int | None
    host: str
    lines: tuple[str, ...]


def last_attempt(log: str) -> str:
    """Returns the part of a log that was written since the last start of the job or of its ranks."""
    starts = [match.start() for match in _ATTEMPT_START.finditer(log)]
    return log[starts[-1] :] if starts else log


def first_failure(log: str) -> Failure | None:
    """Returns the first failure, from the most reliable message in the log; None if there is no such
    message.
    """
    if match := _TRAINER.search(log):
        rank, host, message = match[1], match[2], match[3]
        if other := _OTHER_RANK.search(message):
            rank, host = other[1], other[2]
        return _failure(rank, host, _block(log, match.start()))
    launchers: list[tuple[re.Pattern[str], Callable[[re.Match[str]], tuple[str | None, str]]]] = [
        (_TORCHRUN, lambda m: (m[2], m[1])),
        (_NODE, lambda m: (None, m[1])),
        (_SRUN, lambda m: (m[2], m[1])),
        (_PALS, lambda m: (m[2], m[1])),
        (_OPEN_MPI, lambda m: (m[1], m[2])),
        (_HYDRA, lambda m: (None, m[1])),
    ]
    for pattern, rank_and_host in launchers:
        if match := pattern.search(log):
            trace = _TRACEBACK.search(log, 0, match.start())
            message = " ".join(match[0].splitlines()[-1].split())
            lines = _block(log, trace.start()) if trace else _lines_before(log, match.start())
            return _failure(*rank_and_host(match), [*lines, message])
    if trace := _TRACEBACK.search(log):
        return Failure(rank=None, host="", lines=tuple(_block(log, trace.start())))
    return None


def last_lines(log: str) -> tuple[str, ...]:
    """Returns the last 5 lines of a log, which are shown if no failure was found."""
    return tuple(line[:_MAX_CHARS] for line in log.rstrip().splitlines()[-5:])


def _failure(rank: str | None, host: str, lines: list[str]) -> Failure:
    return Failure(rank=int(rank) if rank else None, host=host, lines=tuple(lines))


def _block(log: str, start: int) -> list[str]:
    """Returns the line at `start`, or the whole traceback: up to its first line that is not indented."""
    lines = log[start : start + 64 * 1024].splitlines()
    if "Traceback (most recent call last)" not in lines[0]:
        return [lines[0][:_MAX_CHARS]]
    end = next(
        (i for i, line in enumerate(lines[1:], start=1) if line and line[0] not in " \t"), len(lines) - 1
    )
    block = lines[: end + 1]
    shown = block if len(block) <= _MAX_LINES else [block[0], "  ...", *block[2 - _MAX_LINES :]]
    return [line[:_MAX_CHARS] for line in shown]


def _lines_before(log: str, end: int) -> list[str]:
    return [line[:_MAX_CHARS] for line in log[:end].splitlines()[-_NUM_LINES_BEFORE:] if line.strip()]
