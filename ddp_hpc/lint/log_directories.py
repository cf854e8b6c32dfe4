"""Log directories in directives that do not exist on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from ddp_hpc.lint.parse_script import Script

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
    written = Path(path) if path.endswith("/") else Path(path).parent
    if "%" in str(written) or (start is None and not written.is_absolute()):
        return ""
    directory = (start or Path()) / written
    try:
        if directory.is_dir():
            return ""
        # The directories of another machine, such as /scratch, do not exist here.
        root = Path(*directory.parts[:_KNOWN_PARTS])
        is_here = directory != root and root.is_dir()
    except OSError:  # an unreadable parent directory, or a name that is too long
        return ""
    return str(written) if is_here else ""


def exists_near(path: Path, directory: str) -> bool:
    """Returns whether a relative directory exists beside a script, or in one of three directories above.

    Of those above, the ones above home directories, such as / and /home, are not searched.
    """
    if Path(directory).is_absolute():
        return False
    own, *above = path.absolute().parents[:4]
    parents = [own, *(parent for parent in above if len(parent.parts) > 2)]
    try:
        return any((parent / directory).is_dir() for parent in parents)
    except OSError:  # an unreadable parent directory, or a name that is too long
        return False


def created_directories(script: Script) -> dict[str, int]:
    """Maps each directory that the job creates with mkdir to the number of its line.

    A mkdir before sbatch is ignored, since it may run on the login node: `mkdir logs; sbatch $0; exit`. A
    relative path after cd is ignored, too, as it is not relative to the directory of the logs.
    """
    lines: dict[str, int] = {}
    submits = max((c.line for c in script.commands if c.name == "sbatch"), default=0)
    has_moved = False
    for command in script.commands:
        if command.name in ("cd", "pushd"):
            has_moved = has_moved or not re.search("SLURM_SUBMIT_DIR|PBS_O_WORKDIR", command.text)
        elif command.name == "mkdir" and command.line > submits:
            for word in command.argv[1:40]:
                is_name = word and not word.startswith("-") and "\0" not in word
                if is_name and (word.startswith("/") or not has_moved):
                    lines.setdefault(str(Path(word)), command.line)
    return lines


def directory_of(path: str) -> str:
    """Returns the directory of a log file; empty for a path without a directory."""
    directory = str(Path(path) if path.endswith("/") else Path(path).parent) if path else "."
    return "" if directory in (".", "/") or len(path) > _MAX_CHARS else directory
