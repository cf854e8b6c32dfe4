"""Parses the command line of a launcher, given a table with the options of the real launcher."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class RefusedError(Exception):
    """A stand-in refuses a request. It prints this message and exits with `exit_code`."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Table:
    """The options of one program. Each option is a name with its spellings, written without dashes.

    Options in `values` take one value, options in `pairs` take two, and options in `bare` take none, or one
    after `=`. With `long_only`, long options can begin with one dash, as in mpiexec. Otherwise, one dash
    begins a short option, whose value can follow the letter directly, and long options can be abbreviated.
    """

    values: Mapping[str, tuple[str, ...]]
    bare: Mapping[str, tuple[str, ...]]
    pairs: frozenset[str] = frozenset()
    long_only: bool = True
    bad_option: str
    """The message about an unknown option or a missing value. {what} is the error message of getopt, {word}
    the option as it was written, and {name} the option without dashes and value."""
    bad_number: str = ""
    """The message for an option {name} whose value {text} is not a positive integer."""
    exit_codes: tuple[int, int] = (1, 1)
    """The exit codes for a bad option and a bad number."""
    version: str = ""
    """The output of --version."""

    def find(self, spelling: str) -> str | None:
        """Returns the name of an option; None if it does not exist or the abbreviation is ambiguous."""
        tables = (self.values, self.bare, {name: (name,) for name in self.pairs})
        known = {s: name for table in tables for name, spellings in table.items() for s in spellings}
        if spelling in known:
            return known[spelling]
        names = {name for s, name in known.items() if len(s) > 1 and s.startswith(spelling)}
        return names.pop() if not self.long_only and len(spelling) > 1 and len(names) == 1 else None

    def refuse_option(self, word: str, what: str) -> RefusedError:
        """Returns the error about an option as it was written on the command line."""
        name = word.lstrip("-").partition("=")[0]
        return RefusedError(self.bad_option.format(what=what, word=word, name=name), self.exit_codes[0])


def spellings(words: str) -> dict[str, tuple[str, ...]]:
    """Returns the spellings of each option in a text such as `help:h quiet`, keyed by the first spelling."""
    return {word.partition(":")[0]: tuple(word.split(":")) for word in words.split()}


@dataclass
class Line:
    """A parsed command line: the last value of each option, all options in order, and the command."""

    table: Table
    values: dict[str, str] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    given: list[tuple[str, str]] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

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
            raise RefusedError(self.table.bad_number.format(text=text, name=name), self.table.exit_codes[1])
        return int(text)

    def take(self, name: str, value: str) -> None:
        """Adds an option with its value to the parsed line."""
        self.values[name] = value
        self.given.append((name, value))


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
        option = table.find(name)
        if option is None:
            what = f"invalid option -- '{name}'" if is_short else f"unrecognized option '{word}'"
            raise table.refuse_option(word, what)
        if option in table.bare:
            line.flags.add(option)
            if is_short and value:
                words.insert(0, f"-{value}")  # -ab means -a -b
            else:
                line.take(option, value)
            continue
        num_values = 2 if option in table.pairs else 0 if equals else 1
        if len(words) < num_values:
            raise table.refuse_option(word, f"option '{word}' requires an argument")
        if num_values:
            value = " ".join(words[:num_values])
            del words[:num_values]
        line.take(option, value)
    line.command = words
    return line


def run_launcher(argv: Sequence[str], root: Path, table: Table, launch: Callable[[Line, Path], int]) -> int:
    """Prints the version of a launcher, or launches ranks; returns the exit code."""
    line = read_line(argv, table)
    if "version" not in line.flags:
        return launch(line, root)
    sys.stdout.write(f"{table.version}\n")
    return 0
