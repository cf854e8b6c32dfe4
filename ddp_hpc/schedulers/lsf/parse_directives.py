"""Parses the options in #BSUB lines (bsub.1)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

BARE = frozenset(
    re.findall(
        r"\S+",
        "ar B datachk H h hl I Ip IS ISp ISs Is IX K N Ne r rn rnc tty ul V x XF Zs",
    )
)
LONG = BARE | frozenset(
    re.findall(
        r"\S+",
        "a alloc_flags app b C c clusters cn_cu cn_mem core_isolation csm cwd D data datagrp E Ep e env "
        "eo eptl ext F f freq G g gpu i is J Jd jobaff json jsdl jsdl_strict jsm k L Ld Lp ln_mem "
        "ln_slots M m mig n network nnodes notify o oo outdir P pack ptl Q q R rcacct rcq S s sla smt sp "
        "stage step_cgroup T t ti U u v W We w wa wt yaml ",
    )
)
_SHORT = frozenset(name for name in LONG if len(name) == 1)
# The characters with which a value can begin if it follows its option letter directly. Without this table,
# -nodes would be read as the option -n with the value odes.
_BEGINS = {**dict.fromkeys("bCcDFMnpSTtvW", "0123456789"), "g": "/"}


def split_words(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields each flag with its value; a word that does not belong to an option has an empty flag.

    The value of a one-letter option may follow the letter directly, as in -n4. A comment ends the line.
    """
    index = 0
    while index < len(words):
        word, index = words[index], index + 1
        if word.startswith("#"):
            return
        if not word.startswith("-") or word == "-":
            yield "", word
            continue
        flag, value = word, ""
        letter, rest = word[1:2], word[2:]
        if word[1:] not in LONG and letter in _SHORT and rest[0] in _BEGINS.get(letter, rest[0]):
            flag, value = f"-{letter}", rest
        following = words[index] if index < len(words) else ""
        if not value and flag[1:] not in BARE and following and (following == "-" or following[0] != "-"):
            value, index = following, index + 1
        yield flag, value


def is_known(flag: str) -> bool:
    """Returns whether bsub has an option with this flag."""
    return flag[1:] in LONG
