"""Finds the rank that failed first, its host and its error message at the end of a job's log."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.queue.launcher_messages import RankMessage, begin_after_requeue, failed_rank, without_them

_MAX_LINES = 12
_MAX_CHARS = 300
_NUM_LINES_BEFORE = 3
# A requeued job appends to the same log. Each attempt begins with a line of the supervisor, or with a line of
# the trainer if torchrun has restarted the ranks.
_ATTEMPT_START = re.compile(
    r"^(?:ddp-hpc: job \S{1,300}: |resuming after step [0-9]+ \(epoch )", re.MULTILINE
)
_TRACEBACK = re.compile(r"^.{0,80}?Traceback \(most recent call last\):", re.MULTILINE)
_RANK_OF_TORCH = re.compile(r"\[rank([0-9]{1,7})\]: ")
# Messages of ddp_hpc.train: the first rank that fails prints its error, which can name another rank.
_TRAINER = re.compile(r"^\[(?:rank ([0-9]+)(?:/[0-9]+)? )?(\S+)\] (error: .*|Traceback .*)", re.MULTILINE)
_OTHER_RANK = re.compile(r"(?:^error: |lost contact with )rank ([0-9]+) on ([A-Za-z0-9_.-]+)")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure of a job. `rank` is None if only the host is known; `lines` are lines of the log.

    `exit_code` is that of the rank, 128 + the number of its signal; None if it is unknown.
    """

    rank: int | None
    host: str
    lines: tuple[str, ...]
    exit_code: int | None = None


def last_attempt(log: str) -> str:
    """Returns the part of a log that was written since the last start of the job or of its ranks."""
    starts = [match.start() for match in _ATTEMPT_START.finditer(log)]
    return log[max(begin_after_requeue(log), *starts[-1:], 0) :]


def first_failure(log: str, recorded: AttemptEnd | None = None) -> Failure | None:
    """Returns the first failure, from the most reliable message in the log; None if there is no such
    message.

    `recorded` is the recorded end of an attempt that has failed.
    """
    own = without_them(log)
    if match := _TRAINER.search(own):
        rank, host, text = match[1], match[2], match[3]
        if other := _OTHER_RANK.search(text):
            rank, host = other[1], other[2]
        lines = _block(own, match.start())
        return Failure(rank=int(rank) if rank else None, host=host, lines=tuple(lines))
    message = failed_rank(log)
    if recorded is not None:
        message = _of_rank(recorded, message)
    if message is not None:
        lines = [*_lines_about(log, own, message), *([message.text] if message.text else [])]
        return Failure(rank=message.rank, host=message.host, lines=tuple(lines), exit_code=message.exit_code)
    if trace := _TRACEBACK.search(own):
        label = _RANK_OF_TORCH.search(trace[0])
        rank = int(label[1]) if label else None
        return Failure(rank=rank, host="", lines=tuple(_block(own, trace.start())))
    return None


def last_lines(log: str) -> tuple[str, ...]:
    """Returns the last 5 lines of a log, which are shown if no failure was found."""
    return tuple(line[:_MAX_CHARS] for line in log.rstrip().splitlines()[-5:])


def _of_rank(end: AttemptEnd, message: RankMessage | None) -> RankMessage:
    """Returns the launcher's message if it is about the rank that failed first, otherwise its record."""
    if message is not None and message.rank == end.rank:
        return replace(message, host=message.host or end.host, exit_code=end.exit_code)
    return RankMessage(
        rank=end.rank,
        host=end.host,
        exit_code=end.exit_code,
        text=end.reason,
        start=message.start if message is not None else -1,
    )


def _lines_about(log: str, own: str, message: RankMessage) -> list[str]:
    """Returns the traceback of the rank, or the last lines before the launcher's message."""
    before = without_them(log[: message.start]) if message.start >= 0 else own
    labelled = re.search(rf"^.{{0,80}}?\[rank{message.rank}\]: Traceback \(most", own, re.MULTILINE)
    trace = labelled or _TRACEBACK.search(before) or _TRACEBACK.match(own, len(before))
    return _block(own, trace.start()) if trace else _lines_before(before)


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


def _lines_before(before: str) -> list[str]:
    return [line[:_MAX_CHARS] for line in before.splitlines()[-_NUM_LINES_BEFORE:] if line.strip()]
