"""The options in the directives of a user's script, as its scheduler reads them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

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


class ScriptOptions(ABC):
    """The options in the directives of a user's script, as its scheduler reads them."""

    @abstractmethod
    def read(self) -> Sequence[ReadOption]:
        """Returns the options of the directives before the first command."""

    def value(self, *flags: str) -> str | None:
        """Returns the value of the last directive with one of these flags; None if there is none."""
        return next((option.value for option in reversed(self.read()) if option.flag in flags), None)

    def resources(self) -> Iterator[tuple[ReadOption, str, str]]:
        """Yields each resource of the `-l` options of PBS: the directive, the name and the value."""
        for option in self.read():
            if option.flag == "-l":
                for part in option.value.split(","):
                    name, _, value = part.partition("=")
                    yield option, name.strip(), value.strip()


def last_directive(script: ScriptOptions, flag: str) -> tuple[int, str] | None:
    """Returns the line number and the value of the last directive with this flag; None if there is none."""
    values = [(option.line, option.value) for option in script.read() if flag and option.flag == flag]
    return values[-1] if values else None


def whole_number(text: str | None) -> int | None:
    """Returns `text` as a whole number, or None if it is not one."""
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else None
