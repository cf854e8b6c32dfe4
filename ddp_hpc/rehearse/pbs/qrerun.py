"""Stand-in for `qrerun JOB`, which it refuses, because only managers can use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import server


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> None:
    """Refuses the request.

    Raises:
        RefusedError: always.
    """
    server.check_running("qrerun", root)
    number = server.job_number("qrerun", argv[-1] if argv else "", root)
    name = f"{number}.{server.Settings.read(root).server}"
    raise RefusedError(f"qrerun: Unauthorized Request  {name}", server.NO_PERMISSION)
