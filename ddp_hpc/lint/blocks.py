"""Blocks of bash, such as those of `if` and `for`, around the commands of a script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_hpc.lint.parse_script import Command

_OPENS = frozenset(("if", "case", "for", "while", "until", "select", "{"))
_CLOSES = frozenset(("fi", "esac", "done", "}"))
_KEYWORDS = _OPENS | _CLOSES | {"then", "else", "elif", "do", "!"}


def with_depth(commands: Iterable[Command]) -> Iterator[tuple[Command, int]]:
    """Yields each command with the number of blocks around it, without those of parentheses."""
    depth = 0
    for command in commands:
        for word in takewhile(_KEYWORDS.__contains__, command.words):
            depth += (word in _OPENS) - (word in _CLOSES)
        yield command, depth


def until_exit(commands: Iterable[Command], lines: Sequence[str]) -> tuple[tuple[Command, ...], int]:
    """Returns the commands up to an `exit` or `exec PROGRAM` that always ends the script, and the last line
    that bash may reach. Such a command begins a line without a blank, is outside of all blocks, and depends
    on no other command.
    """
    reached, before = [], "\n"
    for command, depth in with_depth(commands):
        reached.append(command)
        is_last = re.match(r"exit\b|exec\s+[^\s<>\d]", lines[command.line - 1])
        if is_last and depth == 0 and {before, command.ends} <= {"\n", ";"}:
            return tuple(reached), command.line
        before = command.ends
    return tuple(reached), len(lines)
