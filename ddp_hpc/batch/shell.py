"""Words of a bash command line: quoted once, at the edge."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\\": r"\\", "'": r"\'"}


class Raw(str):
    """A piece of bash that is written as it is, such as `"$num_ranks"` with its quotes."""

    __slots__ = ()


Word = str | Raw


def sh(word: Word | int) -> str:
    """`word`, or a number, as bash reads it back, on one line; a `Raw` is left alone.

    Control characters become `$'...'`: a line break inside a quoted word would
    end the comment that holds it, and qsub refuses a script with a carriage
    return anywhere.
    """
    if isinstance(word, Raw):
        return word
    if not isinstance(word, str | int):
        raise TypeError(f"sh quotes text and numbers, and this is {word!r}: ask for it with an if before")
    word = str(word)
    if all(ch >= " " and ch != "\x7f" for ch in word):
        return shlex.quote(word)
    escaped = "".join(
        _ESCAPES.get(ch) or (ch if ch >= " " and ch != "\x7f" else f"\\{ord(ch):03o}") for ch in word
    )
    return f"$'{escaped}'"


def sh_join(words: Iterable[Word]) -> str:
    """The words as one bash command line."""
    return " ".join(sh(word) for word in words)
