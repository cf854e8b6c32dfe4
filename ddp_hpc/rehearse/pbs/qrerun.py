"""`qrerun JOB`: refused, because only managers can use it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import server


def rerun(argv: Sequence[str], _environ: Mapping[str, str]) -> None:
    """Refuses the request.

    Raises:
        RefusedError: always.
    """
    root = server.directory()
    number = server.job_number("qrerun", argv[-1] if argv else "", root)
    name = f"{number}.{server.read_settings(root).server}"
    raise RefusedError(f"qrerun: Unauthorized Request  {name}", server.NO_PERMISSION)


def main() -> NoReturn:
    """The entry point of the installed command."""
    server.run(rerun, sys.argv[1:], os.environ)
