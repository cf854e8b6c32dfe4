"""The lines that launchers and schedulers write into the log of a job, between the lines of its program.

A launcher can write such a line at any time, even between two lines of a traceback.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

# Since Slurm 25.05, slurmstepd writes a time in brackets instead of its name.
_FOREIGN = re.compile(
    r"^(?:srun: |slurmstepd(?:-\S{1,255})?: |\[[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}(?:\.[0-9]{1,6})?\] |"
    r"=>> PBS: |"
    r"\[(?:mpiexec|proxy:[0-9:]{1,20})@[^\]\s]{1,255}\] ).*(?:\n|\Z)",
    re.MULTILINE,
)
# slurmstepd's last message about an attempt of a job that Slurm has requeued.
_REQUEUED = re.compile(
    r"^.{0,300}?error: \*\*\* JOB \S{1,40} ON \S{1,255} CANCELLED AT \S{1,40} DUE TO "
    r"(?:JOB REQUEUE|NODE FAILURE|PREEMPTION)\b.*(?:\n|\Z)",
    re.MULTILINE,
)

CAUSES = (
    ("walltime", re.compile(r"DUE TO TIME LIMIT|=>> PBS: job killed: walltime")),
    # slurmstepd writes `oom-kill event(s)` in Slurm 22.05, and `oom_kill event` in 26.05. The other messages
    # are those of OverMemoryKill, and those for mem and vmem in OpenPBS's resmom/linux/mom_mach.c.
    (
        "memory",
        re.compile(
            r"oom[-_]kill event|: Out Of Memory$|exceeded memory limit .{0,80}, being killed|"
            r"Exceeded (?:job|step) memory limit|=>> PBS: job killed: v?mem",
            re.MULTILINE,
        ),
    ),
    ("node", re.compile(r"Node failure on |DUE TO NODE FAILURE")),
    ("preempted", re.compile(r"DUE TO PREEMPTION")),
)
"""Causes of a job's end that launchers and schedulers report only in the log: a name and a pattern."""

# The table that torchrun prints.
_TORCHRUN = re.compile(
    r"Root Cause \(first observed failure\):\n\[[0-9]+\]:\n(?:.*\n)??  host +: (?P<host>\S+)\n"
    r"  rank +: (?P<rank>[0-9]+) .*\n  (?P<end>exitcode +: .*)"
)
_PATTERNS = (
    _TORCHRUN,
    re.compile(r"^srun: error: (?P<end>Node failure on (?P<host>[^\s,]+))", re.MULTILINE),
    # `tasks 0-3: Exited with exit code 1`: the first of these tasks is reported.
    re.compile(
        r"^srun: error: (?P<host>[^\s:]+): tasks? (?P<rank>[0-9]+)[0-9,-]*: (?!running)(?P<end>.*)",
        re.MULTILINE,
    ),
    # HPE's mpiexec (PALS), Open MPI, and Hydra, which does not report the rank.
    re.compile(
        r"^(?P<host>[A-Za-z0-9_.-]+): rank (?P<rank>[0-9]+) (?P<end>(?:exited|died) .*)", re.MULTILINE
    ),
    re.compile(r"process rank (?P<rank>[0-9]+) with PID [0-9]+ on node (?P<host>\S+) (?P<end>exited .*)"),
    re.compile(r"^=   PID [0-9]+ RUNNING AT (?P<host>\S+)\n=   (?P<end>EXIT CODE: [0-9]+)", re.MULTILINE),
)
_CODE = re.compile(r"(?:exit code|exited with code|exitcode +:) *(-?[0-9]{1,3})")
_SIGNAL = re.compile(r"on signal ([0-9]{1,2})|from signal ([0-9]{1,2})")
_SIGNAL_TEXTS = {text: number for number in signal.valid_signals() if (text := signal.strsignal(number))}
_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, kw_only=True)
class RankMessage:
    """A launcher's message about the end of a rank. `rank` and `exit_code` are None if they are not reported.

    `start` is the position of the message in the log. For a signal, `exit_code` is 128 + its number.
    """

    rank: int | None
    host: str
    exit_code: int | None
    text: str
    start: int


def without_them(log: str) -> str:
    """Returns the log without the lines of launchers and schedulers that can interrupt those of programs."""
    return _FOREIGN.sub("", log)


def begin_after_requeue(log: str) -> int:
    """Returns where the output of the last attempt begins, if Slurm has reported a requeue; 0 otherwise."""
    ends = [match.end() for match in _REQUEUED.finditer(log)]
    # Slurm also reports the end of the last attempt, which the output of no other attempt follows.
    return next((end for end in reversed(ends) if without_them(log[end:]).strip()), 0)


def failed_rank(log: str) -> RankMessage | None:
    """Returns the first message about a rank that failed, of the launcher that reports the most.

    A rank that was terminated has failed only if no other rank has: launchers terminate the others.
    """
    for pattern in _PATTERNS:
        messages = [_message(match) for match in pattern.finditer(log)]
        if messages:
            return next((each for each in messages if each.exit_code != _TERMINATED), messages[0])
    return None


def _message(match: re.Match[str]) -> RankMessage:
    known = match.groupdict()
    rank = known.get("rank")
    return RankMessage(
        rank=int(rank) if rank else None,
        host=known["host"],
        exit_code=_exit_code(known["end"]),
        text=" ".join(match[0].splitlines()[-1].split()),
        start=match.start(),
    )


def _exit_code(end: str) -> int | None:
    if match := _CODE.search(end):
        code = int(match[1])
        return 128 - code if code < 0 else code
    if match := _SIGNAL.search(end):
        return 128 + int(match[1] or match[2])
    number = _SIGNAL_TEXTS.get(end.partition(" (")[0].strip())
    return 128 + number if number else None
