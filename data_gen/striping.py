"""Lustre's layout of a new file, by the hint of the job script. Elsewhere than on Lustre nothing happens."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

HINT = "DDP_HPC_LUSTRE_STRIPE"

# -1 is all of the file system's targets; the sizes are those that lfs takes.
_FORM = re.compile(r"(?P<count>-1|[1-9][0-9]{0,3})(?:,(?P<size>[1-9][0-9]{0,9}[kKmMgG]?))?")
# What lfs says where there is no Lustre (lustre/utils/liblustreapi.c: llapi_file_open_param); an older one
# lets the kernel say so.
_ELSEWHERE = ("is not on a Lustre filesystem", "Inappropriate ioctl for device")
_LIMIT_S = 30.0
# docs.nersc.gov, performance/io/lustre: below that, the default is as good, and fewer servers are asked.
_LARGE_BYTES = 10**9


def stripe(path: Path, num_bytes: int) -> str | None:
    """Makes the empty file `path`, spread over Lustre's targets as the variable DDP_HPC_LUSTRE_STRIPE says.

    A layout is fixed when the file is made; whoever writes it later must truncate it,
    not replace it. The variable is `COUNT` or `COUNT,SIZE`, the arguments of `lfs
    setstripe -c` and `-S`. Without it, without `lfs`, on another file system, or for
    a file below 1 GB nothing is made and nothing said: it is a hint, and a file without
    it is as good.

    Returns:
        A warning, where the hint cannot be read or Lustre refused it; the file may be there then.
    """
    hint = os.environ.get(HINT, "")
    if not hint or num_bytes < _LARGE_BYTES:
        return None
    match = _FORM.fullmatch(hint)
    if match is None:
        return f"{HINT}={hint!r} is no hint for striping; COUNT or COUNT,SIZE is needed, such as 8,4M"
    size = ["-S", match["size"]] if match["size"] else []
    argv = ["lfs", "setstripe", "-c", match["count"], *size, str(path.absolute())]
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        return None
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{HINT}={hint}: lfs setstripe did not work ({error}); the file has the folder's layout"
    if done.returncode == 0 or any(words in done.stderr for words in _ELSEWHERE):
        return None
    said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    return f"{HINT}={hint}: lfs setstripe refused it ({said}); the file has the folder's layout"
