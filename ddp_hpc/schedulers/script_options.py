"""The options in the directives of a user's script, as its scheduler reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Fault = Literal["", "stray", "unclosed", "colon", "unknown", "ambiguous", "no value", "extra value"]


@dataclass(frozen=True, kw_only=True)
class ReadOption:
    """One option of a directive as its scheduler parses it, or one word that the scheduler rejects.

    `flag` is `-l` on PBS and the long name, such as `--nodes`, on Slurm. For a word that does not belong to
    an option, `flag` is empty and `value` is the word. `written` is the text in the script. `fault` is the
    reason why the scheduler rejects the option regardless of its value. `component` is the index of the
    component of a heterogeneous job, from 0.
    """

    line: int
    flag: str
    value: str = ""
    written: str = ""
    fault: Fault = ""
    component: int = 0


class DirectiveLine(Protocol):
    """One option in a directive of a user's script."""

    @property
    def line(self) -> int:
        """The line number, from 1."""
        ...

    @property
    def flag(self) -> str:
        """`-l` on PBS; the long name, such as `--nodes`, on Slurm."""
        ...

    @property
    def value(self) -> str:
        """The text after the flag."""
        ...


class ScriptOptions(Protocol):
    """The options in the directives of a user's script, as its scheduler reads them."""

    def read(self) -> Sequence[DirectiveLine]:
        """Returns the directives before the first command."""
        ...

    def value(self, *flags: str) -> str | None:
        """Returns the value of the last directive with one of these flags; None if there is no such
        directive.
        """
        ...

    def resources(self) -> Iterator[tuple[DirectiveLine, str, str]]:
        """Yields each resource of the `-l` options of PBS: the directive, the name and the value."""
        ...


def last_directive(script: ScriptOptions, flag: str) -> tuple[int, str] | None:
    """Returns the line number and the value of the last directive with this flag; None if there is none."""
    found = [(one.line, one.value) for one in script.read() if flag and one.flag == flag]
    return found[-1] if found else None


def whole_number(text: str | None) -> int | None:
    """Returns `text` as a whole number, or None if it is not one."""
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else None
