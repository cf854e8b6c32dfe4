"""Sets the stripe layout of a new file on Lustre as requested by the job script."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

HINT = "DDP_HPC_LUSTRE_STRIPE"

# A count of -1 uses all targets of the file system; the sizes are those that lfs accepts.
_FORM = re.compile(r"(?P<count>-1|[1-9][0-9]{0,3})(?:,(?P<size>[1-9][0-9]{0,9}[kKmMgG]?))?")
# What lfs prints for a file system that is not Lustre (lustre/utils/liblustreapi.c: llapi_file_open_param);
# older versions print the kernel's message.
_NOT_LUSTRE = ("is not on a Lustre filesystem", "Inappropriate ioctl for device")
_LIMIT_S = 30.0
# According to docs.nersc.gov, performance/io/lustre, the default layout is sufficient for smaller files.
_LARGE_BYTES = 10**9


def stripe(path: Path, num_bytes: int) -> str | None:
    """Creates the empty file `path` with the layout in the environment variable DDP_HPC_LUSTRE_STRIPE.

    The layout is fixed when a file is created, so the file must later be filled and not
    replaced. The variable is `COUNT` or `COUNT,SIZE`, the arguments of `lfs setstripe -c`
    and `-S`. The layout is only a hint: without the variable, without `lfs`, on another file
    system, or for a file smaller than 1 GB, this function does nothing.

    Returns:
        A warning if the variable is invalid or Lustre rejected the layout (the file may exist
        then), otherwise None.
    """
    hint = os.environ.get(HINT, "")
    if not hint or num_bytes < _LARGE_BYTES:
        return None
    match = _FORM.fullmatch(hint)
    if match is None:
        return f"ignoring invalid {HINT}={hint!r}; expected COUNT or COUNT,SIZE, such as 8,4M"
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
        return f"{HINT}={hint}: lfs setstripe failed ({error}); the file has the layout of its directory"
    if done.returncode == 0 or any(text in done.stderr for text in _NOT_LUSTRE):
        return None
    reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    return f"{HINT}={hint}: lfs setstripe failed ({reason}); the file has the layout of its directory"
