"""What the programs in the directory of a script, and in the one above, do with it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

_PROGRAMS = frozenset((".py", ".sh", ".bash", ".csh", ".pl", ".rb", ".jl", ".R", ".ipynb", ".mk", ".m", ""))
_MAX_FILES = 60
_MAX_BYTES = 200_000
_STARTS = r"\b(?:bash|sh|zsh|source|Rscript|python3?|perl|julia)[ \t]+(?:-[\w-]+[ \t]+)*"


def is_started_by_others(path: Path) -> bool:
    """Returns whether programs beside the file start it with an interpreter, and none submits it."""
    name = rf"[\"']?[\w./${{}}-]*(?<![\w.-]){re.escape(path.name)}(?![\w.-])"
    started = re.compile(rf"(?m)^[^#\n]*{_STARTS}{name}")
    submitted = re.compile(rf"\b(?:sbatch|qsub|submit)\b[^\n]*{re.escape(path.name)}")
    texts = [text for text in texts_beside(path, {".md", ".rst", ".txt"}) if path.name in text]
    return not any(map(submitted.search, texts)) and any(map(started.search, texts))


def is_submitted_with(path: Path | None, flags: Collection[str]) -> bool:
    """Returns whether programs beside the file submit it and give the scheduler each of these options, whose
    values then replace those in the file.
    """
    missing = set(flags)
    for text in texts_beside(path) if path else ():
        if path and path.name in text and re.search(r"\b(?:sbatch|qsub)\b", text):
            missing = {flag for flag in missing if not _gives(text, flag)}
        if not missing:
            return True
    return False


def _gives(text: str, flag: str) -> bool:
    option = re.escape(flag)  # one that sbatch does not know may contain any character
    # Many commands have a letter such as -l.
    given = rf"{option}[= ]" if flag[:2] == "--" else rf"\b(?:sbatch|qsub)\b.{{,500}}\s{option}[= ]"
    return re.search(given, text) is not None


def texts_beside(path: Path, others: Collection[str] = ()) -> Iterator[str]:
    """Yields the texts of programs, and of files with the suffixes `others`, in the directory of the file and
    in the one above.
    """
    for directory in islice(path.absolute().parents, 2):
        try:
            beside = [one for one in sorted(directory.iterdir()) if one.name != path.name]
            for one in [one for one in beside if one.suffix in _PROGRAMS or one.suffix in others][
                :_MAX_FILES
            ]:
                if one.is_file() and one.stat().st_size <= _MAX_BYTES:
                    yield one.read_text("utf-8", "replace")
        except OSError:  # the directory or a file cannot be read
            continue
