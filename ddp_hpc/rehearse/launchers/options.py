"""Parses the command lines of launchers and of commands of a scheduler."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class RefusedError(Exception):
    """A stand-in refuses a request. It prints this message and exits with `exit_code`."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Table:
    """The options of one program: the names of all spellings, which are written without dashes.

    Options in `values` take one value, options in `pairs` take two, and options in `bare` take none, or one
    after `=`. With `long_only`, long options can begin with one dash, as in mpiexec. Otherwise, one dash
    begins a short option, whose value can follow the letter directly.
    """

    program: str
    values: Mapping[str, str]
    bare: Mapping[str, str]
    pairs: Mapping[str, str] = field(default_factory=dict)
    long_only: bool = True

    def refuse(self, what: str) -> RefusedError:
        """Returns the error that begins with the name of the program."""
        return RefusedError(f"{self.program}: {what}")


def spellings(words: str) -> dict[str, str]:
    """Returns the first spelling of each option in a text such as `help:h quiet`, keyed by all spellings."""
    options = [word.split(":") for word in words.split()]
    return {spelling: option[0] for option in options for spelling in option}


@dataclass
class Line:
    """A parsed command line: all options with their values in order, and the command."""

    table: Table
    given: list[tuple[str, str]] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    @property
    def values(self) -> dict[str, str]:
        """The last value of each option, which is empty for an option without a value."""
        return dict(self.given)

    def all_of(self, name: str) -> list[str]:
        """Returns all values of an option that can be repeated."""
        return [value for option, value in self.given if option == name]

    def number(self, name: str, default: int) -> int:
        """Returns the value of an option as a positive integer.

        Raises:
            RefusedError: the value is not a positive integer.
        """
        text = self.values.get(name, str(default))
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
            raise self.table.refuse(f'error: Invalid numeric value "{text}" for --{name}.')
        return int(text)


def read_line(argv: Sequence[str], table: Table) -> Line:
    """Parses the options up to the first word that is not an option, and the command after them.

    Raises:
        RefusedError: an option is unknown, or its value is missing.
    """
    line, words = Line(table), list(argv)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        name, equals, value = word.lstrip("-").partition("=")
        is_short = not table.long_only and not word.startswith("--")
        if is_short:
            name, value = word[1], word[2:].removeprefix("=")
            equals = value
        if name in table.bare:
            if is_short and value:
                words.insert(0, f"-{value}")  # -ab means -a -b
                value = ""
            line.given.append((table.bare[name], value))
            continue
        if name not in table.values and name not in table.pairs:
            raise table.refuse(f"unrecognized option '{word}'")
        num_values = 2 if name in table.pairs else 0 if equals else 1
        if len(words) < num_values:
            raise table.refuse(f"option '{word}' requires an argument")
        if num_values:
            value = " ".join(words[:num_values])
            del words[:num_values]
        line.given.append(({**table.values, **table.pairs}[name], value))
    line.command = words
    return line
