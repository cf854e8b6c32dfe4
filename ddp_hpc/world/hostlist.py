"""Slurm's compressed lists: host names such as `n[1-2,5]` and counts such as `2(x3),1`."""

from __future__ import annotations

import re

from ddp_hpc.errors import LaunchError

_BRACKETS = re.compile(r"\[([0-9,-]+)\]")


def expand_hostlist(text: str) -> list[str]:
    """Every host of a list, in its order: `gpu[001-002],x` gives gpu001, gpu002, x.

    What `scontrol show hostnames` prints, without asking for scontrol, which
    containers lack. Several brackets in one name multiply, the last one fastest.

    Raises:
        LaunchError: for text that is no host list.
    """
    hosts: list[str] = []
    for item in _split_outside_brackets(text.strip()):
        if not item:
            raise LaunchError(
                f"the host list {text!r} has an empty entry; Slurm writes lists such as n[1-2,5]"
            )
        hosts.extend(_expand_one(item, text))
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text)


def _expand_one(item: str, whole: str) -> list[str]:
    bracket = _BRACKETS.search(item)
    if bracket is None:
        if "[" in item or "]" in item:
            raise LaunchError(f"the host list {whole!r} has brackets that hold no numbers")
        return [item]
    before, after = item[: bracket.start()], item[bracket.end() :]
    hosts: list[str] = []
    for part in bracket[1].split(","):
        first, dash, last = part.partition("-")
        if not first or (dash and not last) or "-" in last:
            raise LaunchError(f"the host list {whole!r} has a range {part!r} that cannot be read")
        width = len(first)
        for number in range(int(first), int(last or first) + 1):
            hosts.extend(_expand_one(f"{before}{number:0{width}d}{after}", whole))
    return hosts


def expand_counts(text: str) -> list[int]:
    """Tasks of each node from SLURM_STEP_TASKS_PER_NODE: `2(x3),1` gives 2, 2, 2, 1.

    Raises:
        LaunchError: for text that is no such list.
    """
    counts: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise LaunchError(f"{text!r} is no list of tasks per node; Slurm writes 2(x3),1")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts
