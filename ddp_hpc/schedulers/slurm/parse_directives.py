"""Reads #SBATCH lines as sbatch does: first into words, then into options with getopt_long.

Source: `get_argument` and `_opt_batch_script` in src/sbatch/opt.c of SchedMD/slurm 22.05; getopt_long(3).
Since 24.05, a backslash protects a blank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ddp_hpc.schedulers.script_options import Fault, ReadOption
from ddp_hpc.schedulers.slurm.sbatch_options import OPTIONS, SRUN_OPTIONS, SbatchOption, find_option

_SPACE = " \t\n\v\f\r"
_COMPONENT = re.compile(r"\s*(?:hetjob|packjob)(?!\S)", re.IGNORECASE)
_NONE: Fault = ""
_LETTERS = {option.letter: option for option in OPTIONS.values() if option.letter}
_LETTERS_OF_SRUN = {option.letter: option for option in SRUN_OPTIONS.values() if option.letter}


def split_line(text: str) -> tuple[list[str], Fault]:
    """Returns the words of a directive after its prefix, up to a comment."""
    words: list[str] = []
    position = 0
    while position < len(text):
        while position < len(text) and text[position] in _SPACE:
            position += 1
        if text[position : position + 1] == ":":
            return words, "colon"
        word, position, quote = _word(text, position)
        if quote:
            return words, "unclosed"
        if word is None:
            break
        words.append(word)
    return words, ""


def _word(text: str, position: int) -> tuple[str | None, int, str]:
    """Returns the word at a position, the position after it, and the quote that is open at the end."""
    pieces: list[str] = []
    quote, escaped, has_word = "", False, False
    while position < len(text):
        char = text[position]
        # A backslash does not protect a blank.
        if not quote and char in _SPACE:
            break
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
            position += 1
            continue
        elif quote:
            if char == quote:
                quote = ""
                position += 1
                continue
        elif char in "\"'":
            quote = char
            position += 1
            continue
        elif char == "#":
            return ("".join(pieces) if has_word else None), len(text), ""
        pieces.append(char)
        has_word = True
        position += 1
    return ("".join(pieces) if has_word else None), position, quote


def read_options(lines: Sequence[tuple[int, str]]) -> Iterator[ReadOption]:
    """Yields the options of #SBATCH lines; `lines` has their numbers and their text after the prefix.

    sbatch reads all lines as a single command line, so an option without its value takes the first word of
    the next line. Of a heterogeneous job, only the first component is read.
    """
    words: list[tuple[int, str]] = []
    for line, text in lines:
        # `hetjob` (`packjob` before Slurm 20.02) separates the components of a heterogeneous job.
        if _COMPONENT.match(text):
            break
        of_line, fault = split_line(text)
        words += [(line, word) for word in of_line]
        if fault:
            yield ReadOption(line=line, flag="", value=text, written=text, fault=fault)
    yield from _options(words)


def _options(words: Sequence[tuple[int, str]]) -> Iterator[ReadOption]:
    index = 0
    while index < len(words):
        line, word = words[index]
        following = words[index + 1][1] if index + 1 < len(words) else None
        index += 1
        used = False
        if word == "--":
            for line, word in words[index:]:
                yield ReadOption(line=line, flag="", value=word, written=word, fault="stray")
            return
        if word.startswith("--"):
            option, used = _long(line, word, following)
            yield option
        elif word.startswith("-") and len(word) > 1:
            bundle, used = _letters(line, word, following)
            yield from bundle
        else:
            yield ReadOption(line=line, flag="", value=word, written=word, fault="stray")
        index += used


def read_command(words: Sequence[str], *, of_srun: bool) -> tuple[list[ReadOption], Sequence[str]]:
    """Returns the options of srun or sbatch up to its program or script, and the words from there on."""
    options: list[ReadOption] = []
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-", "--"):
        following = words[index + 1] if index + 1 < len(words) else None
        if words[index].startswith("--"):
            option, used = _long(0, words[index], following, of_srun)
            bundle = [option]
        else:
            bundle, used = _letters(0, words[index], following, of_srun)
        options += bundle
        index += 1 + used
    return options, words[index:]


def _long(line: int, word: str, following: str | None, of_srun: bool = False) -> tuple[ReadOption, bool]:
    name, equals, value = word[2:].partition("=")
    known = find_option(name[:80], of_srun)
    fault: Fault = ""
    if not isinstance(known, SbatchOption):
        fault = "ambiguous" if known else "unknown"
        # sbatch exits at an unknown option. Take the next word as its value, so that lint does not report
        # that word too.
        used = not equals and following is not None and not following.startswith("-")
        value = following or "" if used else value
        return ReadOption(line=line, flag=f"--{name}", value=value, written=word, fault=fault), used
    used = known.value == "required" and not equals
    if used and following is None:
        fault = "no value"
    elif used:
        value = following or ""
    elif known.value == "none" and equals:
        fault = "extra value"
    return ReadOption(line=line, flag=known.flag, value=value, written=word, fault=fault), used


def _letters(
    line: int, word: str, following: str | None, of_srun: bool = False
) -> tuple[list[ReadOption], bool]:
    """Returns the options of a word such as `-vN2`, and whether the next word is the value of the last
    one.
    """
    options: list[ReadOption] = []
    for position, letter in enumerate(word[1:], start=1):
        option = (_LETTERS_OF_SRUN if of_srun else _LETTERS).get(letter)
        if option is None:
            options.append(ReadOption(line=line, flag=f"-{letter}", written=word, fault="unknown"))
            return options, following is not None and len(word) == 2 and not following.startswith("-")
        value, used, fault = "", False, _NONE
        if option.value != "none":
            value = word[position + 1 :]
            used = not value and option.value == "required"
            if used:
                value, fault = following or "", "no value" if following is None else _NONE
        options.append(ReadOption(line=line, flag=option.flag, value=value, written=word, fault=fault))
        if option.value != "none":
            return options, used
    return options, False
