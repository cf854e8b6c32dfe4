"""Whether bash understands a text, without running any of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

_LIMIT_S = 10


def bash_complaint(text: str) -> tuple[int, str] | None:
    """Line and words of what `bash -n` says is wrong; None where nothing is, or where there is no bash."""
    bash = shutil.which("bash")
    if bash is None or "\0" in text:
        return None
    given = text.encode("utf-8", "surrogateescape")
    try:
        done = subprocess.run(
            [bash, "-n"],
            input=given,
            capture_output=True,
            check=False,
            timeout=_LIMIT_S,
            env={**os.environ, "LC_ALL": "C"},  # or the words come in the user's language
        )
    except subprocess.TimeoutExpired:
        return None
    # A here-document that is never closed is only a warning to bash, and eats the rest of the script.
    said = done.stderr.decode("utf-8", "replace")
    for complaint in said.splitlines():
        match = re.match(r".*?: line (\d{1,9}): (.*)", complaint)
        if match and (done.returncode or "here-document" in match[2]):
            return int(match[1]), match[2]
    return (1, said.strip().partition("\n")[0]) if done.returncode else None
