"""Environment variables that the supervisor sets for the ranks."""

from __future__ import annotations

import os
import re
import secrets
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ddp_hpc.base.private_directory import make_private
from ddp_hpc.sites.profile_tables import DEFAULT_LOCAL_FOLDER, Node

# A socket's path has at most 107 characters, and Python's multiprocessing creates sockets in TMPDIR.
_MAX_TMPDIR_CHARS = 40
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "torchinductor"}
_EXPORT = re.compile(r"^\s*export\s+([A-Za-z_][A-Za-z0-9_]*)=", re.MULTILINE)


def local_dir(node: Node, environ: Mapping[str, str]) -> str:
    """Returns the node-local directory of a profile, which can begin with a variable such as `$TMPDIR`."""
    variable, rest = node.local_folder_parts
    return f"{environ.get(variable) or DEFAULT_LOCAL_FOLDER}{rest}" if variable else rest


def kernel_cache_paths(environ: Mapping[str, str], directory: str) -> dict[str, str]:
    """Returns directories for compiled kernels. Triton's default is the home directory, which nodes share."""
    return {
        name: environ.get(name) or str(Path(directory, f"{subdirectory}-{os.getuid()}"))
        for name, subdirectory in _CACHES.items()
    }


def private_kernel_caches(environ: Mapping[str, str], directory: str) -> dict[str, str]:
    """Returns directories for compiled kernels after creating them.

    Ranks execute the files in these directories, so one to which other users can write is replaced.
    """
    paths = kernel_cache_paths(environ, directory)
    for name, path in paths.items():
        try:
            is_private = make_private(Path(path))
        except OSError:
            is_private = False
        if not is_private:
            paths[name] = tempfile.mkdtemp()
    return paths


def short_tmpdir(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns a TMPDIR whose path is short enough for sockets; empty if the present one is short enough."""
    return {"TMPDIR": "/tmp"} if len(environ.get("TMPDIR", "")) > _MAX_TMPDIR_CHARS else {}  # noqa: S108 - a new TMPDIR


def launch_id() -> str:
    """Returns a unique ID of this launch, with which ranks without MPI find each other."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def exported_names(script: str) -> list[str]:
    """Returns the names of the variables that a job script exports, in order."""
    return list(dict.fromkeys(_EXPORT.findall(script)))
