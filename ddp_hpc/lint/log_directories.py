"""Log directories in directives that do not exist on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ddp_hpc.lint.parse_script import Command

_MAX_CHARS = 1000
# Parts of an absolute path, after which a missing directory means that it was not created, not that the
# script is for another machine.
_KNOWN_PARTS = 3


def missing_directory(path: str, start: Path | None) -> str:
    """Return the directory of a log file if it does not exist; empty if it exists or cannot be known.

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


def created_directory(path: str, commands: Iterable[Command]) -> int | None:
    """Return the line of the command that creates the directory of a log file; None without one."""
    directory = str(Path(path).parent) if not path.endswith("/") else str(Path(path))
    if directory in (".", "/") or not path or len(path) > _MAX_CHARS:
        return None
    for command in commands:
        words = {str(Path(word)) for word in command.argv[1:40] if word and "\0" not in word}
        if command.name == "mkdir" and directory in words:
            return command.line
    return None
