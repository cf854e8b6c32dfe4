"""Reports exceptions of the user's own code: one line with message and location, the traceback in a file."""

from __future__ import annotations

import os
import sysconfig
import tempfile
import traceback
from pathlib import Path

from ddp_hpc.base.text_table import cut

TRACEBACKS = "tracebacks"
_MAX_CHARS = 300
_OURS = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def message_of(error: BaseException) -> str:
    """Returns the error's message; for a KeyError, its argument, because str() would add quotes."""
    return str(error.args[0] if isinstance(error, KeyError) and error.args else error)


def describe_error(error: BaseException) -> str:
    """Returns the error with its innermost location in the user's own code.

    Example: `ValueError: bad width (mine.py:12 in forward)`.
    """
    text = cut(" ".join(message_of(error).split()), _MAX_CHARS)
    kind = type(error).__name__
    place = _place(error)
    return (f"{kind}: {text}" if text else kind) + (f" ({place})" if place else "")


def traceback_of(error: BaseException) -> str:
    """Returns the complete traceback, as Python prints it."""
    return "".join(traceback.format_exception(error))


def write_traceback(text: str, run_dir: Path | None, rank: int) -> Path:
    """Writes the traceback of a failed rank to a file that only this user can read; returns its path.

    The file is in the run directory, or in a new temporary directory if that is None.

    Raises:
        OSError: the file cannot be written.
    """
    directory = (run_dir or Path(tempfile.mkdtemp(prefix="ddp-hpc-"))) / TRACEBACKS
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank{rank:05d}.txt"
    path.unlink(missing_ok=True)  # remove the file of an earlier attempt
    with open(path, "x", encoding="utf-8", errors="backslashreplace", opener=_private) as file:
        file.write(text.rstrip("\n") + "\n")
    return path


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)] or frames[-1:]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""


def _is_library(filename: str) -> bool:
    if filename.startswith("<"):  # frozen or generated code
        return True
    path = Path(filename).resolve()
    return path.is_relative_to(_OURS) or any(path.is_relative_to(directory) for directory in _LIBRARIES)
