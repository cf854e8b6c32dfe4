"""What the programs in the directory of a script, and in the one above, do with it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

_PROGRAMS = frozenset((".py", ".sh", ".bash", ".csh", ".pl", ".rb", ".jl", ".R", ".ipynb", ".mk", ".m", ""))
_MAX_FILES = 60
_MAX_BYTES = 200_000
_MAX_USES = 200  # of a file in another one
_MAX_CHARS = 1_000  # of a line, before and after the name of the file
# What comes before the name of a file that is started, opened, or written into another one.
_STARTS = re.compile(
    r"\b(?:bash|sh|zsh|source|Rscript|python3?|perl|julia)[ \t]+(?:-[\w-]+[ \t]+)*[\"']?[\w./${}-]*$"
    r"|\bopen\([\"'][^\"']*$"
)
_COPIES = re.compile(r"\b(?:cat|sed|awk|envsubst)\b")
_SUBMITS = re.compile(r"\b(?:sbatch|qsub|submit)\b")


def is_only_used_by_others(path: Path) -> bool:
    """Returns whether programs beside the file start it with an interpreter, or write it into another file,
    and none submits it.
    """
    name, is_used = re.compile(rf"(?<![\w.-]){re.escape(path.name)}(?![\w.-])"), False
    for text in texts_beside(path, {".md", ".rst", ".txt"}):
        for match in islice(name.finditer(text), _MAX_USES):
            begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
            before = text[max(begin, match.start() - _MAX_CHARS) : match.start()]
            after = text[
                match.end() : match.end() + _MAX_CHARS if end < 0 else min(end, match.end() + _MAX_CHARS)
            ]
            if _SUBMITS.search(before):
                return False
            is_copied = _COPIES.search(before) and re.search("[>|]", after)
            is_used |= "#" not in before and bool(is_copied or _STARTS.search(before))
    return is_used


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
