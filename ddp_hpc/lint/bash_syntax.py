"""Syntax check of bash scripts with `bash -n`, which does not run them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import lru_cache
from typing import NamedTuple

from ddp_hpc.lint.parse_script import Script

_LIMIT_S = 10


@lru_cache(maxsize=32)
def bash_complaint(text: str) -> tuple[int, str] | None:
    """Returns the line number and the message of the first error that `bash -n` reports.

    Returns None if bash reports no error, takes longer than _LIMIT_S, crashes, or is not installed, and for a
    text with a NUL character.
    """
    if "\0" in text:
        return None
    returned, found = _bash_n(text)
    if returned:
        # Errors stop the job, unlike warnings.
        found.sort(key=lambda one: one[1].startswith("warning: "))
        others = found[1:] if "unexpected end of file" in found[0][1] else []
        return next((one for one in others if _is_the_cause(one[1], text)), found[0])
    # bash only warns about an unclosed here-document, although the rest of the script becomes a part of it.
    # If a shell reads it, that shell runs these commands.
    return next((one for one in found if "here-document" in one[1] and not _is_for_shell(one[1], text)), None)


def _bash_n(text: str) -> tuple[int, list[tuple[int, str]]]:
    """Returns the exit status of `bash -n`, and the lines and the messages that it reports.

    These are 0 and an empty list if bash takes too long, crashes, or is not installed.
    """
    bash = shutil.which("bash")
    if bash is None:
        return 0, []
    try:
        done = subprocess.run(
            [bash, *(("-O", "extglob") if "extglob" in text else ()), "-n"],  # bash -n does not run shopt
            input=text.replace("\r\n", "\n").encode("utf-8", "surrogateescape"),
            capture_output=True,
            check=False,
            timeout=_LIMIT_S,
            env={**os.environ, "LC_ALL": "C"},  # bash prints its messages in English
        )
    except subprocess.TimeoutExpired:
        return 0, []
    if done.returncode < 0:  # bash 5.2 crashes at 1,900 levels of nested $( )
        return 0, []
    output = done.stderr.decode("utf-8", "replace")
    found = [(int(line), message) for line, message in re.findall(r".*?: line (\d{1,9}): (.*)", output)]
    if done.returncode and not found:
        found = [(1, output.strip().partition("\n")[0])]
    return done.returncode, found


def _is_the_cause(message: str, text: str) -> bool:
    """Returns whether a message is about a here-document, and the script is correct without the blanks around
    the delimiter of this document, and of others with the same one.
    """
    document = open_document(message, text)
    if document is None or not document.almost:
        return False
    lines = (line.strip() if line.strip() == document.delimiter else line for line in text.splitlines())
    return _bash_n("\n".join(lines)) == (0, [])


class OpenDocument(NamedTuple):
    """A here-document that is not closed.

    `almost` is the line that contains its delimiter and blanks, 0 if there is none. `is_harmless` means that
    no command follows which it would swallow.
    """

    line: int
    delimiter: str
    almost: int
    is_harmless: bool


def open_document(message: str, text: str) -> OpenDocument | None:
    """Returns the here-document of a warning of bash; None if the message is another one."""
    match = re.match(r"warning: here-document at line (\d{1,9}) .*wanted `(.*)'", message)
    if match is None:
        return None
    start, lines = int(match[1]), text.splitlines()
    almost = next((n for n, line in enumerate(lines, start=1) if n > start and line.strip() == match[2]), 0)
    rest = lines[almost or start :]
    return OpenDocument(start, match[2], almost, not any(line.strip() for line in rest))


def is_reached(script: Script, line: int) -> bool:
    """Returns whether bash may reach a line: it ends the script at a syntax error, and at an exit."""
    complaint = bash_complaint(script.text)
    return line <= script.end and (complaint is None or complaint[0] >= line)


def _is_for_shell(message: str, text: str) -> bool:
    """Returns whether a shell reads the unclosed here-document, and nothing looks like its end."""
    document = open_document(message, text)
    if document is None or document.almost:
        return False
    return bool(re.search(r"\b(?:ba|z|k|s)?sh(?:ell)?\b.*<<", text.splitlines()[document.line - 1]))
