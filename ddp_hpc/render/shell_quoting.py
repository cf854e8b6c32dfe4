"""Quotes words for bash command lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\\": r"\\", "'": r"\'"}


class Raw(str):
    """Bash text that is not quoted again, such as `"$num_ranks"` including its quotes."""

    __slots__ = ()


Word = str | Raw


def sh(word: Word | int) -> str:
    """Quotes a word or a number for bash, without line breaks. Returns a `Raw` unchanged.

    Control characters are written as `$'...'`, since a line break would end a comment that contains the
    word, and qsub rejects scripts with carriage returns.
    """
    if isinstance(word, Raw):
        return word
    if not isinstance(word, str | int):
        raise TypeError(
            f"sh can only quote text and numbers, not {word!r}. In the template, check the value with "
            "an if statement first."
        )
    word = str(word)
    if all(ch >= " " and ch != "\x7f" for ch in word):
        return shlex.quote(word)
    escaped = "".join(
        _ESCAPES.get(ch) or (ch if ch >= " " and ch != "\x7f" else f"\\{ord(ch):03o}") for ch in word
    )
    return f"$'{escaped}'"


def sh_join(words: Iterable[Word]) -> str:
    """Returns the words as one bash command line."""
    return " ".join(sh(word) for word in words)
