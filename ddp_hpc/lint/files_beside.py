"""What programs and READMEs beside a job script say about how it is submitted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ddp_hpc.schedulers.reader import ScriptReader

_PROGRAMS = frozenset((".py", ".sh", ".bash", ".csh", ".pl", ".rb", ".jl", ".R", ".ipynb", ".mk", ".m", ""))
_MAX_FILES = 60
_MAX_BYTES = 200_000
_MAX_CHARS = 500
# A program that writes scripts after a header: for script in a.sh b.sh; do ... cat "$script" >> "$file".
_APPENDS = re.compile(r"(?s)\bfor\s+(\w+)\s+in\b.{0,2000}?\bcat\s+\"?\$\{?\1\}?\"?\s*>>")


def is_part_of_others(path: Path | None) -> bool:
    """Returns whether a program beside the file starts it with bash or writes it into another file, and none
    contains its name after sbatch or qsub.
    """
    if path is None or not path.name:
        return False
    name = re.escape(path.name)
    texts = [text for text in _texts_beside(path) if path.name in text]
    lines = list(_lines_with(path.name, texts))
    file = rf"[\"']?(?:(?:\$\([^()]*\)|[^\s()])*/)?{name}(?=[\s\"';)]|$)"
    starts = r"(?:(?:nohup|time|srun(?:\s+-\S+)*)\s+)?(?:bash|sh|source|\.)|sbatch\s.*--wrap.*sh"
    adds = rf"(?:cat|sed|envsubst)\s(?:[^|#>]*\s)?{file}[^|#>]*>>|.*#!/.*\bcat\s+{file}"
    uses = re.compile(rf"\s*(?:(?:{starts}) {file}|{adds}|cat\s(?:[^|#>]*\s)?{file}[^|#>]*> *(?!/dev/)\S)")
    is_submitted = any(
        re.search(rf"(?:sbatch|qsub|submit)\b(?!.*--wrap)[^|]*(?<![\w.-]){name}", line) for line in lines
    )
    is_used = any(map(uses.match, lines)) or any(map(_APPENDS.search, texts))
    return not is_submitted and (is_used or _is_end_of_another(path))


def _is_end_of_another(path: Path) -> bool:
    """Returns whether a script beside the file consists of a shebang, a few lines, and this file."""
    own = next(_texts_in(path.absolute().parent, lambda one: one.name == path.name), "")
    others = _texts_in(
        path.absolute().parent, lambda one: one.name.endswith(path.suffix) and one.name != path.name
    )
    return bool(own.strip()) and any(
        one.startswith("#!") and one != own and one.endswith(own) for one in others
    )


def options_on_submission(path: Path | None, reader: ScriptReader) -> frozenset[str]:
    """Returns the options that programs and READMEs beside a script give to sbatch or qsub with it.

    If they submit it several times, these are the options of all submissions.
    """
    if path is None or not path.name:
        return frozenset()
    texts = [*_texts_beside(path), *_readmes(path)]
    name = rf"(?<![\w.-]){re.escape(path.name)}(?![\w-]|\.\w)"
    command = re.compile(rf"\b(?:sbatch|qsub)\s((?:(?!\b(?:sbatch|qsub)\b|, )[^;&|])*?){name}")
    found = (match[1] for line in _lines_with(path.name, texts) for match in command.finditer(line))
    words = {word for text in found for word in re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", text)}
    read = reader.read_directives([(1, f"{word} 1") for word in words])
    return frozenset(option.flag for option in read if option.flag)


def _lines_with(name: str, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        if name in text:
            lines = text.replace("\\\n", " ").splitlines()
            yield from (line[:_MAX_CHARS] for line in lines if name in line)


def _texts_beside(path: Path) -> Iterator[str]:
    """Yields the texts of programs in the directory of the file, and in the one above."""
    for directory in islice(path.absolute().parents, 2):
        yield from _texts_in(directory, lambda one: one.suffix in _PROGRAMS and one.name != path.name)


def _readmes(path: Path) -> Iterator[str]:
    for directory in islice(path.absolute().parents, 3):
        yield from _texts_in(directory, lambda one: one.name.lower().startswith("readme"))


def _texts_in(directory: Path, is_wanted: Callable[[Path], bool]) -> Iterator[str]:
    try:
        files = list(islice(filter(is_wanted, sorted(directory.iterdir())), _MAX_FILES))
    except OSError:
        return  # nobody may list the directory
    for file in files:
        with suppress(OSError):  # the file of another user
            if file.is_file() and file.stat().st_size <= _MAX_BYTES:
                yield file.read_text("utf-8", "replace")
