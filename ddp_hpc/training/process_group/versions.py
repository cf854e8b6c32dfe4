"""The versions of the software that can affect results."""

from __future__ import annotations

import platform

from ddp_hpc.base.version import __version__


def versions() -> dict[str, str]:
    """Returns the versions of the software that can affect results."""
    # Commands for login nodes, without numpy and torch, import this module.
    import numpy as np
    import torch

    found = {
        "ddp_hpc": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return found
