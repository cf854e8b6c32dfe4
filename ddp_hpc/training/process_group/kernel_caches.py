"""Protects the caches of compiled kernels from other users, because files in these caches are executed.

Job scripts use `/tmp/triton-UID` and similar names, and torch by default `/tmp/torchinductor_NAME`. Any user
of the node can guess these names and create the directory first.
"""

from __future__ import annotations

import getpass
import os
import re
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from ddp_hpc.base.private_directory import make_private

_TRITON, _INDUCTOR = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"


def keep_kernels_private(environ: MutableMapping[str, str], host: str) -> None:
    """Creates the cache directories with mode 0700, or uses new ones if other users can write to them.

    Call this function before torch is imported. If a directory cannot be created, torch handles the error.
    Triton's default is in the home directory, and is not checked.
    """
    for variable, directory in ((_TRITON, environ.get(_TRITON)), (_INDUCTOR, environ.get(_INDUCTOR))):
        path = directory or (_default_of_torch() if variable == _INDUCTOR else "")
        if not path:
            continue
        try:
            if make_private(Path(path)):
                continue
            environ[variable] = tempfile.mkdtemp(prefix=f"{Path(path).name[:40]}-")
        except OSError:
            continue
        sys.stderr.write(
            f"[{host}] warning: {path} belongs to another user or is writable by others, and kernels "
            f"in it are executed. Using {environ[variable]} instead; set {variable} to your own "
            f"directory, or run chmod go-w {path}\n"
        )


def _default_of_torch() -> str:
    """Returns torch's default directory (torch/_inductor/runtime/cache_dir_utils.py, default_cache_dir)."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        user = f"uid_{os.getuid()}"
    name = re.sub(r'[\\/:*?"<>|]', "_", user)
    return str(Path(tempfile.gettempdir()) / f"torchinductor_{name}")
