"""Finds the rank that failed first, its host and its error message."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddp_hpc.base.attempt_end import AttemptEnd

_MAX_LINES = 12
_MAX_CHARS = 300
_NUM_LAST_LINES = 5
# A requeued job appends to the same log. Each attempt begins with a line of the supervisor, or with a line of
# the trainer if torchrun has restarted the ranks, or after the line of slurmstepd about a requeue.
_ATTEMPT_START = re.compile(
    r"^(?:ddp-hpc: job \S{1,300}: |resuming after step [0-9]+ \(epoch |"
    r".{0,300}?error: \*\*\* JOB \S{1,40} ON \S{1,255} CANCELLED AT \S{1,40} DUE TO JOB REQUEUE\b)",
    re.MULTILINE,
)
_TRACEBACK = re.compile(r"^.{0,80}?Traceback \(most recent call last\):", re.MULTILINE)
_RANK_OF_TORCH = re.compile(r"\[rank([0-9]{1,7})\]: ")
# Messages of ddp_hpc.train: the first rank that fails prints its error, which can name another rank.
_TRAINER = re.compile(r"^\[(?:rank ([0-9]+)(?:/[0-9]+)? )?(\S+)\] (error: .*|Traceback .*)", re.MULTILINE)
_OTHER_RANK = re.compile(r"(?:^error: |lost contact with )rank ([0-9]+) on ([A-Za-z0-9_.-]+)")
# Lines of srun and of daemons, which can come between two lines of a traceback. Since Slurm 25.05, slurmstepd
# writes a time in brackets instead of its name.
_OF_LAUNCHER = re.compile(
    r"^(?:srun: |slurmstepd(?:-\S{1,255})?: |\[[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}(?:\.[0-9]{1,6})?\] |"
    r"=>> PBS: |"
    r"\[(?:mpiexec|proxy:[0-9:]{1,20})@[^\]\s]{1,255}\] ).*(?:\n|\Z)",
    re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure of a job. `rank` is None if it is unknown; `lines` are lines of the log.

    `exit_code` is that of the rank, 128 + the number of its signal; None if it is unknown.
    """

    rank: int | None
    host: str
    lines: tuple[str, ...]
    exit_code: int | None = None


def last_attempt(log: str) -> str:
    """Returns the part of a log that was written since the last start of the job or of its ranks."""
    starts = [match.start() for match in _ATTEMPT_START.finditer(log)]
    return log[starts[-1] if starts else 0 :]


def first_failure(log: str, recorded: AttemptEnd | None = None) -> Failure | None:
    """Returns the first failure, from the record of the attempt's end or else from the log; None if neither
    has one.

    `recorded` is the recorded end of an attempt that has failed.
    """
    own = _OF_LAUNCHER.sub("", log)
    if match := _TRAINER.search(own):
        rank, host, text = match[1], match[2], match[3]
        if other := _OTHER_RANK.search(text):
            rank, host = other[1], other[2]
        lines = _block(own, match.start())
        return Failure(rank=int(rank) if rank else None, host=host, lines=tuple(lines))
    rank_of_record = recorded.rank if recorded is not None else None
    labelled = re.search(rf"^.{{0,80}}?\[rank{rank_of_record}\]: Traceback \(most", own, re.MULTILINE)
    trace = labelled or _TRACEBACK.search(own)
    lines = _block(own, trace.start()) if trace else []
    if recorded is not None:
        shown = (*(lines or last_lines(log)), *filter(None, [recorded.reason]))
        return Failure(rank=recorded.rank, host=recorded.host, lines=shown, exit_code=recorded.exit_code)
    if trace is None:
        return None
    label = _RANK_OF_TORCH.search(trace[0])
    return Failure(rank=int(label[1]) if label else None, host="", lines=tuple(lines))


def last_lines(log: str) -> tuple[str, ...]:
    """Returns the last 5 lines of a log, which are shown if no failure was found."""
    return tuple(line[:_MAX_CHARS] for line in log.rstrip().splitlines()[-_NUM_LAST_LINES:])


def _block(log: str, start: int) -> list[str]:
    """Returns the line at `start`, or the whole traceback: up to its first line that is not indented."""
    lines = log[start : start + 64 * 1024].splitlines()
    if "Traceback (most recent call last)" not in lines[0]:
        return [lines[0][:_MAX_CHARS]]
    lines = _of_one_rank(lines)
    end = next(
        (i for i, line in enumerate(lines[1:], start=1) if line and line[0] not in " \t"), len(lines) - 1
    )
    block = lines[: end + 1]
    shown = block if len(block) <= _MAX_LINES else [block[0], "  ...", *block[2 - _MAX_LINES :]]
    return [line[:_MAX_CHARS] for line in shown]


def _of_one_rank(lines: list[str]) -> list[str]:
    """Returns the lines with the label of the first line, without this label; all lines if it has none.

    torch prints `[rank1]: ` before each line of a traceback, and `srun --label` prints `1: `.
    """
    label = lines[0].partition("Traceback")[0]
    if not label.endswith(": "):
        return lines
    own = [line.removeprefix(label) for line in lines if line.startswith(label)]
    return own if len(own) > 1 else lines
