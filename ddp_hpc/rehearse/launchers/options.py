"""Parse the command line of a launcher, given a table with the options of the real launcher."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn


class RefusedError(Exception):
    """The launcher refuses to start ranks; has its error message and exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class UnknownOptionError(Exception):
    """The command line contains an option that is not in the table."""


class MissingValueError(Exception):
    """The command line ends with an option whose value is missing."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The options of one program: the spellings of each option, without dashes, by its name.

    `values` have one value and `pairs` two; `bare` have none, or one after `=`. With `long_only`, long
    options can begin with one dash, as in mpiexec. Otherwise one dash begins a short option, whose value
    can follow the letter directly, and long options can be abbreviated.
    """

    values: Mapping[str, tuple[str, ...]]
    bare: Mapping[str, tuple[str, ...]]
    pairs: frozenset[str] = frozenset()
    long_only: bool = True

    def find(self, spelling: str) -> str:
        """Returns the name of an option.

        Raises:
            UnknownOptionError: the option does not exist, or the abbreviation is ambiguous.
        """
        tables = (self.values, self.bare, {name: (name,) for name in self.pairs})
        known = {s: name for table in tables for name, spellings in table.items() for s in spellings}
        if spelling in known:
            return known[spelling]
        found = {name for s, name in known.items() if len(s) > 1 and s.startswith(spelling)}
        if self.long_only or len(spelling) < 2 or len(found) != 1:
            raise UnknownOptionError
        return found.pop()


def spellings(words: str) -> dict[str, tuple[str, ...]]:
    """Returns the options in a text such as `name other:o`, by their first spelling."""
    return {word.partition(":")[0]: tuple(word.split(":")) for word in words.split()}


@dataclass
class Line:
    """A parsed command line: the last value of each option, all options in order, and the command."""

    values: dict[str, str] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    given: list[tuple[str, str]] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def all_of(self, name: str) -> list[str]:
        """Returns all values of an option that can be repeated."""
        return [value for option, value in self.given if option == name]

    def number(self, name: str, default: int, refuse: Callable[[str, str], RefusedError]) -> int:
        """Returns an option's value as a positive integer; `refuse` makes the error for an invalid value."""
        text = self.values.get(name, str(default))
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
            raise refuse(text, name)
        return int(text)

    def take(self, name: str, value: str) -> None:
        """Adds an option with its value to the parsed line."""
        self.values[name] = value
        self.given.append((name, value))


def read_line(argv: Sequence[str], table: Table) -> Line:
    """Parses the options up to the first word that is not an option, and the command after them.

    Raises:
        UnknownOptionError: with the unknown option as it was written.
        MissingValueError: with the option as it was written.
    """
    line, words = Line(), list(argv)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        name, equals, value = word.lstrip("-").partition("=")
        if not table.long_only and not word.startswith("--"):
            name, value = word[1], word[2:].removeprefix("=")
            equals = value
        try:
            option = table.find(name)
        except UnknownOptionError:
            raise UnknownOptionError(word) from None
        if option in table.bare:
            line.flags.add(option)
            if not table.long_only and not word.startswith("--") and value:
                words.insert(0, f"-{value}")  # several short options after one dash
            else:
                line.take(option, value)
            continue
        num_values = 2 if option in table.pairs else 0 if equals else 1
        if len(words) < num_values:
            raise MissingValueError(word)
        if num_values:
            value = " ".join(words[:num_values])
            del words[:num_values]
        line.take(option, value)
    line.command = words
    return line


def run(
    read: Callable[[Sequence[str]], Line],
    launch: Callable[[Line, Path], int],
    version: str,
    variable: str,
) -> NoReturn:
    """Runs an mpiexec command: prints the version, or launches ranks. Prints errors to stderr."""
    try:
        line = read(sys.argv[1:])
        if "version" in line.flags:
            sys.stdout.write(f"{version}\n")
            sys.exit(0)
        sys.exit(launch(line, Path(os.environ[variable])))
    except RefusedError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
