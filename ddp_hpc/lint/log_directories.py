"""Log directories in directives that do not exist on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ddp_hpc.lint.parse_script import Command

_MAX_CHARS = 1000
# If this many leading parts of an absolute path exist here, a directory that is missing below them was not
# created. Otherwise, the script is probably for another machine.
_KNOWN_PARTS = 3


def missing_directory(path: str, start: Path | None) -> str:
    """Returns the directory of a log file if it does not exist; empty if it exists or cannot be known.

    A relative path begins at `start`, which is None if it is unknown.
    """
    if not path or re.search(r"[$~\0^{}<>]", path) or len(path) > _MAX_CHARS:
        return ""
    directory = Path(path) if path.endswith("/") else Path(path).parent
    if "%" in str(directory) or (start is None and not directory.is_absolute()):
        return ""
    directory = (start or Path()) / directory
    try:
        if directory.is_dir():
            return ""
        # The directories of another machine, such as /scratch, do not exist here.
        root = Path(*directory.parts[:_KNOWN_PARTS])
        is_here = directory != root and root.is_dir()
    except OSError:  # an unreadable parent directory, or a name that is too long
        return ""
    return str(Path(path) if path.endswith("/") else Path(path).parent) if is_here else ""


def created_directories(commands: Iterable[Command]) -> dict[str, int]:
    """Maps each directory that a mkdir of the script creates to the number of its line."""
    found: dict[str, int] = {}
    for command in commands:
        if command.name == "mkdir":
            for word in command.argv[1:40]:
                if word and not word.startswith("-") and "\0" not in word:
                    found.setdefault(str(Path(word)), command.line)
    return found


def directory_of(path: str) -> str:
    """Returns the directory of a log file; empty for a path without a directory."""
    directory = str(Path(path) if path.endswith("/") else Path(path).parent) if path else "."
    return "" if directory in (".", "/") or len(path) > _MAX_CHARS else directory
