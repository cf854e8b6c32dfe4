"""Stand-in for `lfs setstripe -c COUNT [-S SIZE] FILE` of Lustre, for directories below LFS_STAND_IN_MOUNT.

For each striped file it appends a line to LFS_STAND_IN_LOG: stripe count, stripe size in bytes
(0: that of the directory), inode number. Messages and limits are those of lustre/utils/liblustreapi.c
and lfs.c. It imports only the standard library.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}


def fail(code: int, path: str, text: str, *, with_errno: bool = True) -> int:
    reason = f": {os.strerror(code)} ({code})" if with_errno else ""
    print(f"lfs setstripe: {text}{reason}", file=sys.stderr)
    print(f"error: setstripe: create stripe file '{path}' failed", file=sys.stderr)
    return code


def setstripe(words: list[str]) -> int:
    options = {"-c": "0", "-S": "0"}
    while len(words) > 1:
        option, value, *words = words
        if option not in options:
            sys.exit(f"this stand-in has no option {option}")
        options[option] = value
    (path,) = words
    mount = Path(os.environ["LFS_STAND_IN_MOUNT"])
    if not Path(path).parent.resolve().is_relative_to(mount):
        return fail(errno.ENODEV, path, f"'{path}' is not on a Lustre filesystem")
    unit = _UNITS.get(options["-S"][-1].lower(), 1)
    size = int(options["-S"].rstrip("kKmMgG")) * unit
    if size % 65536:
        text = f"error: bad stripe_size {size}, must be an even multiple of 65536 bytes"
        return fail(errno.EINVAL, path, text)
    if size >= 2**32:
        return fail(errno.EINVAL, path, f"error: stripe size '{size}' over 4GB limit")
    if not -1 <= int(options["-c"]) <= 2000:
        return fail(errno.EINVAL, path, f"Invalid stripe count {options['-c']}")
    try:
        with Path(path).open("xb") as file:
            inode = os.fstat(file.fileno()).st_ino
    except FileExistsError:
        text = f"setstripe error for '{path}': stripe already set"
        return fail(errno.EEXIST, path, text, with_errno=False)
    except OSError as error:
        return fail(error.errno or errno.EIO, path, f"unable to open '{path}'")
    with Path(os.environ["LFS_STAND_IN_LOG"]).open("a") as log:
        log.write(f"{options['-c']} {size} {inode}\n")
    return 0


if __name__ == "__main__":
    # Simulates a server that does not respond.
    time.sleep(float(os.environ.get("LFS_STAND_IN_DELAY_S", "0")))
    if sys.argv[1] != "setstripe":
        sys.exit(f"this stand-in has no command {sys.argv[1]}")
    sys.exit(setstripe(sys.argv[2:]))
