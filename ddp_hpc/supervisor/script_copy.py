"""The copy of the job script in the run directory, with which another job resumes the run.

The scheduler deletes its own copy at the end of the job, and the original file may change meanwhile.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

_MARK = "  # the submit command passed this variable to the first job"


def script_copy(content: bytes, without: re.Pattern[bytes], variables: Mapping[str, str]) -> bytes:
    """Returns the script without the lines that match `without`, and with these variables as exports.

    The exports follow the directives, which end at the first command. They set only variables that are not
    set, so a user who resumes the run can pass other values.
    """
    content = without.sub(b"", content)
    for name in variables:
        of_earlier_copy = rf"^export {name}=\${{.*?{re.escape(_MARK)}\n"
        content = re.sub(of_earlier_copy.encode(), b"", content, flags=re.MULTILINE | re.DOTALL)
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines[-1] += b"\n"
    first = next((number for number, line in enumerate(lines) if _is_command(line)), len(lines))
    exports = [
        f"export {name}=${{{name}-{shlex.quote(value)}}}{_MARK}\n".encode("utf-8", "surrogateescape")
        for name, value in variables.items()
    ]
    return b"".join([*lines[:first], *exports, *lines[first:]]) if exports else content


def _is_command(line: bytes) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith(b"#")
