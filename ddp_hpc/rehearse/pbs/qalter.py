"""Stand-in for `qalter -l walltime=LIMIT JOB`: changes the walltime of a job, which takes effect at once."""

from __future__ import annotations

import getopt
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import server
from ddp_hpc.rehearse.pbs.resources import walltime_s


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> None:
    """Changes the walltime.

    Raises:
        RefusedError: the job is unknown or has finished, or a user asks for more time for a running job.
    """
    server.check_running("qalter", root)
    try:
        [(_, given)], [word] = getopt.getopt(list(argv), "l:")
        name, _, limit = given.partition("=")
    except (getopt.GetoptError, ValueError):
        name, word, limit = "", "", ""
    if name != "walltime":
        raise RefusedError("qalter: the stand-in supports only `qalter -l walltime=LIMIT JOB`", 99)
    number = server.job_number("qalter", word, root)
    job = jobs.load(root, number)
    if job["job_state"] == "F":
        raise RefusedError("qalter: Job has finished ", server.FINISHED)
    limit_s = walltime_s(limit)
    if job["job_state"] == "R" and limit_s > job["_walltime_s"]:
        raise RefusedError(f"qalter: Unauthorized Request  {word}", server.NO_PERMISSION)
    change_walltime(root, number, limit_s)


def change_walltime(root: Path, number: int, limit_s: int) -> None:
    """Changes the walltime with the rights of an administrator."""
    resources = {**jobs.load(root, number)["Resource_List"], "walltime": server.clock(limit_s)}
    jobs.change(root, number, _walltime_s=limit_s, Resource_List=resources)
