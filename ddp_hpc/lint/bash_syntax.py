"""Syntax check of bash scripts with `bash -n`, which does not run them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess

_LIMIT_S = 10
# bash parses nested $( ) and <( ) recursively: with a stack of 8 MiB, bash 5.2.15 crashes at 1,900 levels.
# The most deeply nested of 29,280 public job scripts has 10 levels.
MAX_DEPTH = 100


def too_deep_at(text: str) -> int | None:
    """Returns the index of the first parenthesis that is nested deeper than MAX_DEPTH; None if there is none.

    Quotes and comments are not recognized. The `)` of a `case` branch has no opening parenthesis and is
    ignored.
    """
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth = depth + 1 if match[0] == "(" else max(0, depth - 1)
        if depth > MAX_DEPTH:
            return match.start()
    return None


def bash_complaint(text: str) -> tuple[int, str] | None:
    """Returns the line number and the message of the first error that `bash -n` reports.

    Returns None if bash reports no error or takes longer than _LIMIT_S. bash is not run, and None is
    returned, if bash is not installed, if the text contains a NUL character, or if parentheses are nested
    deeper than MAX_DEPTH.
    """
    bash = shutil.which("bash")
    if bash is None or "\0" in text or too_deep_at(text) is not None:
        return None
    try:
        done = subprocess.run(
            [bash, "-n"],
            input=text.encode("utf-8", "surrogateescape"),
            capture_output=True,
            check=False,
            timeout=_LIMIT_S,
            env={**os.environ, "LC_ALL": "C"},  # bash prints its messages in English
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return 1, f"no error, but bash was killed by {name} while reading the script"
    # bash only warns about an unclosed here-document, although the rest of the script becomes a part of it.
    output = done.stderr.decode("utf-8", "replace")
    for complaint in output.splitlines():
        match = re.match(r".*?: line (\d{1,9}): (.*)", complaint)
        if match and (done.returncode or "here-document" in match[2]):
            return int(match[1]), match[2]
    return (1, output.strip().partition("\n")[0]) if done.returncode else None
