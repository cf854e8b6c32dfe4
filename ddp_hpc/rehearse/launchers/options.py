"""A launcher's command line, taken apart by the table of the options that the real launcher knows."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn


class RefusedError(Exception):
    """What the launcher says on stderr before it ends with this exit code; no rank was started."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class UnknownOptionError(Exception):
    """An option that is in no table."""


class MissingValueError(Exception):
    """An option at the end of the line without what belongs to it."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The options of one program, without dashes: by name, the spellings of those with and without a value.

    `pairs` take two words. Options in `bare` may also have a value after `=`. With
    `long_only` one dash does for long names, as in mpiexec; else one dash begins a short
    one, whose value may stand right behind the letter, and long ones may be shortened.
    """

    values: Mapping[str, tuple[str, ...]]
    bare: Mapping[str, tuple[str, ...]]
    pairs: frozenset[str] = frozenset()
    long_only: bool = True

    def find(self, spelling: str) -> str:
        """The option's name.

        Raises:
            UnknownOptionError: there is none, or more than one that begins so.
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
    """The options in `name other:o`, each by its first spelling."""
    return {word.partition(":")[0]: tuple(word.split(":")) for word in words.split()}


@dataclass
class Line:
    """The options by name, the last value of each; `given` has all of them in order; then the command."""

    values: dict[str, str] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    given: list[tuple[str, str]] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def all_of(self, name: str) -> list[str]:
        """Every value of an option that may be repeated."""
        return [value for option, value in self.given if option == name]

    def number(self, name: str, default: int, refuse: Callable[[str, str], RefusedError]) -> int:
        """A count from 1 on; `refuse` makes the launcher's own complaint of option and value."""
        text = self.values.get(name, str(default))
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
            raise refuse(text, name)
        return int(text)

    def take(self, name: str, value: str) -> None:
        """Adds an option."""
        self.values[name] = value
        self.given.append((name, value))


def read_line(argv: Sequence[str], table: Table) -> Line:
    """The options up to the first word that is none, and the command after them.

    Raises:
        UnknownOptionError: its argument is the word as it was typed.
        MissingValueError: likewise.
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
                words.insert(0, f"-{value}")  # several letters behind one dash
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
    """The frame of an mpiexec: --version, else a launch; refusals become stderr and exit code."""
    try:
        line = read(sys.argv[1:])
        if "version" in line.flags:
            sys.stdout.write(f"{version}\n")
            sys.exit(0)
        sys.exit(launch(line, Path(os.environ[variable])))
    except RefusedError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
