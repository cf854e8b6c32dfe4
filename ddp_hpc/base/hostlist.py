"""Slurm's compressed lists: host names such as `n[1-2,5]` and counts such as `2(x3),1`."""

from __future__ import annotations

import itertools
import re

from ddp_hpc.base.errors import LaunchError

# Slurm's own limit (MAX_SLURM_NODES). A longer list is corrupt, or was written to exhaust the memory.
MAX_HOSTS = 65536

_PIECES = re.compile(r"\[([0-9,-]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hostlist(text: str) -> list[str]:
    """Returns every host of a list, in order: `gpu[001-002],x` gives gpu001, gpu002, x.

    The result is that of `scontrol show hostnames`, but scontrol, which containers lack, is not needed.
    If a name has several brackets, all combinations are returned; the last number varies fastest.

    Raises:
        LaunchError: the text is not a host list, or has more than `MAX_HOSTS` hosts.
    """
    hosts: list[str] = []
    for item in _split_outside_brackets(text.strip()):
        if not item:
            raise _invalid(text, "an empty entry")
        hosts.extend(_expand_one(item, text, MAX_HOSTS - len(hosts)))
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    items, start, inside = [], 0, False
    for i, letter in enumerate(text):
        if letter in "[]":
            inside = letter == "["
        elif letter == "," and not inside:
            items.append(text[start:i])
            start = i + 1
    return [*items, text[start:]]


def _expand_one(item: str, whole: str, room: int) -> list[str]:
    pieces: list[list[str]] = []
    num_hosts, end = 1, 0
    for match in _PIECES.finditer(item):
        if match.start() != end:
            break
        end = match.end()
        pieces.append(_numbers(match[1], whole, room) if match[1] else [match[2]])
        num_hosts *= len(pieces[-1])
        if num_hosts > room:
            raise _too_many(whole)
    if end != len(item):
        raise _invalid(whole, "brackets without numbers")
    return ["".join(parts) for parts in itertools.product(*pieces)]


def _numbers(text: str, whole: str, room: int) -> list[str]:
    """Returns the numbers in one pair of brackets: `08-10` gives 08, 09, 10, padded like the first one."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first:
            raise _invalid(whole, f"the invalid range {_short(part)}")
        if last - first >= room - len(numbers):
            raise _too_many(whole)
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """Returns the tasks per node from SLURM_STEP_TASKS_PER_NODE: `2(x3),1` gives 2, 2, 2, 1.

    Raises:
        LaunchError: the text is not such a list, or has more than `MAX_HOSTS` nodes.
    """
    counts: list[int] = []
    for part in text.strip().split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise LaunchError(
                f"{_short(text)} is not a list of tasks per node; Slurm uses the format 2(x3),1"
            )
        if int(match[2] or 1) > MAX_HOSTS - len(counts):
            raise _too_many(text)
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def _invalid(text: str, what: str) -> LaunchError:
    return LaunchError(f"the host list {_short(text)} has {what}; Slurm writes lists such as n[1-2,5]")


def _too_many(text: str) -> LaunchError:
    return LaunchError(
        f"the list {_short(text)} has more than {MAX_HOSTS} nodes, which is Slurm's limit; unset the Slurm "
        "variable that contains it"
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "...")
