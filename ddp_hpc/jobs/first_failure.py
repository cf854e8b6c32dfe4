"""Which rank failed first, where, and with which words: read from the end of a job's log."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_MAX_LINES = 12
_MAX_CHARS = 300
_BEFORE = 3
# Each attempt of a requeued job adds to the same log and begins with the job script's line; ranks that
# torchrun has started again begin with the trainer's.
_BEGINS = re.compile(
    r"^(?:ddp-hpc: job \S{1,300}, .{0,200}? nodes, .{0,200}?, by "
    r"|(?:resuming|going on) after step [0-9]+ \(epoch )",
    re.MULTILINE,
)
_TRACEBACK = re.compile(r"^.{0,80}?Traceback \(most recent call last\):", re.MULTILINE)
# ddp_hpc.train: the first rank that fails speaks for all. It may be telling of another one.
_OURS = re.compile(r"^\[(?:rank ([0-9]+)/[0-9]+ )?(\S+)\] (error: .*|Traceback .*)", re.MULTILINE)
_OF_ANOTHER = re.compile(r"(?:^error: |lost contact with )rank ([0-9]+) on ([A-Za-z0-9_.-]+)")
# srun; a task that was only ended because of another one is `Terminated`.
_SRUN = re.compile(
    r"^srun: error: ([^\s:]+): tasks? ([0-9]+)[0-9,-]*: (?!Terminated|running)(.*)", re.MULTILINE
)
_NODE = re.compile(r"^srun: error: Node failure on ([^\s,]+)", re.MULTILINE)
# HPE's mpiexec (PALS), Open MPI, and Hydra, which does not tell the rank.
_PALS = re.compile(r"^([A-Za-z0-9_.-]+): rank ([0-9]+) ((?:exited|died) .*)", re.MULTILINE)
_OPEN_MPI = re.compile(r"process rank ([0-9]+) with PID [0-9]+ on node (\S+) exited (.*)")
_HYDRA = re.compile(r"^=   PID [0-9]+ RUNNING AT (\S+)\n=   (EXIT CODE: [0-9]+)", re.MULTILINE)
# torchrun's table.
_TORCHRUN = re.compile(
    r"Root Cause \(first observed failure\):\n\[[0-9]+\]:\n(?:.*\n)??  host +: (\S+)\n  rank +: ([0-9]+) .*\n"
    r"  (exitcode +: .*)"
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """`rank` is None where only the host is known; `lines` are the log's own."""

    rank: int | None
    host: str
    lines: tuple[str, ...]


def this_attempt(log: str) -> str:
    """The part of a log since the job, or its ranks, were started the last time."""
    starts = [match.start() for match in _BEGINS.finditer(log)]
    return log[starts[-1] :] if starts else log


def first_failure(log: str) -> Failure | None:
    """The first rank that failed, by whoever tells best; None where nobody does."""
    if match := _OURS.search(log):
        rank, host, words = match[1], match[2], match[3]
        if other := _OF_ANOTHER.search(words):
            rank, host = other[1], other[2]
        return _failure(rank, host, _block(log, match.start()))
    tellers: list[tuple[re.Pattern[str], Callable[[re.Match[str]], tuple[str | None, str]]]] = [
        (_TORCHRUN, lambda m: (m[2], m[1])),
        (_NODE, lambda m: (None, m[1])),
        (_SRUN, lambda m: (m[2], m[1])),
        (_PALS, lambda m: (m[2], m[1])),
        (_OPEN_MPI, lambda m: (m[1], m[2])),
        (_HYDRA, lambda m: (None, m[1])),
    ]
    for pattern, who in tellers:
        if match := pattern.search(log):
            trace = _TRACEBACK.search(log, 0, match.start())
            said = " ".join(match[0].splitlines()[-1].split())
            words_before = _block(log, trace.start()) if trace else _lines_before(log, match.start())
            return _failure(*who(match), [*words_before, said])
    if trace := _TRACEBACK.search(log):
        return Failure(rank=None, host="", lines=tuple(_block(log, trace.start())))
    return None


def last_lines(log: str) -> tuple[str, ...]:
    """The last words of a log that names no rank."""
    return tuple(line[:_MAX_CHARS] for line in log.rstrip().splitlines()[-5:])


def _failure(rank: str | None, host: str, lines: list[str]) -> Failure:
    return Failure(rank=int(rank) if rank else None, host=host, lines=tuple(lines))


def _block(log: str, start: int) -> list[str]:
    """The line at `start`; of a traceback its end as well, which is the first line that is not indented."""
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
    return [line[:_MAX_CHARS] for line in log[:end].splitlines()[-_BEFORE:] if line.strip()]
