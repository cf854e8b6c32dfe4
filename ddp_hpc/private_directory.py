"""Folders in places where others may write too, such as /tmp, whose names anybody can guess."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def is_private(folder: Path) -> bool:
    """Whether `folder` is a directory of this user that nobody else may write to, and no link to one."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    others_may_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not others_may_write


def make_private(folder: Path) -> bool:
    """Makes `folder` with mode 0700 where it is missing; whether it is then private.

    Raises:
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return is_private(folder)
    return True


def others_may_swap_files(folder: Path) -> bool:
    """Whether another user than root may remove or replace this user's files in `folder`.

    Its owner may, and whoever may write to it, unless it is sticky as /tmp is.

    Raises:
        OSError: it cannot be looked at.
    """
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()):
        return True
    return bool(status.st_mode & stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
