"""Private directories with predictable names in places such as /tmp, where other users can write too."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def is_private(directory: Path) -> bool:
    """Returns whether `directory` is a real directory of this user to which no other user can write."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    others_may_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not others_may_write


def make_private(directory: Path) -> bool:
    """Creates `directory` with mode 0700 if it does not exist; returns whether it is private.

    Raises:
        OSError: it cannot be created.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        return is_private(directory)
    return True
