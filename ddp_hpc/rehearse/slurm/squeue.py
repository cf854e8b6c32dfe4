"""Stand-in for `squeue [-h] [-j JOBS] [-o FORMAT]`: lists the jobs that have not ended, without a header."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import Table, read_line, spellings
from ddp_hpc.rehearse.slurm import controller

_TABLE = Table(
    program="squeue",
    values=spellings("jobs:j:job format:o user:u"),
    bare=spellings("noheader:h me"),
    long_only=False,
)
_DEFAULT = "%i %P %j %u %T %L %R"


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> int:
    """Prints one line per job.

    Raises:
        RefusedError: an option is unknown.
    """
    line = read_line(argv, _TABLE)
    ids = filter(None, line.values.get("jobs", "").split(","))
    wanted = [jobs.find_job(word, root, "slurm_load_jobs error: Invalid job id specified") for word in ids]
    pattern = line.values.get("format", _DEFAULT)
    for number in wanted or jobs.numbers(root):
        job = jobs.load(root, number)
        if job["state"] not in controller.OVER:
            _print(pattern, _values(job))
    return 0


def _print(pattern: str, values: Mapping[str, str]) -> None:
    sys.stdout.write(re.sub(r"%[.\d]*([a-zA-Z])", lambda match: values.get(match[1], ""), pattern) + "\n")


def _values(job: jobs.Attributes) -> dict[str, str]:
    left_s = job["end"] - time.time() if job.get("end") else 0
    nodes = controller.hostlist(job["nodes"])
    return {
        "i": str(job["number"]),
        "P": job["partition"],
        "j": job["name"],
        "u": job["user"],
        "T": job["state"],
        "L": _time(left_s),
        "R": nodes if job["state"] == "RUNNING" else f"({job['reason']})",
    }


def _time(seconds: float) -> str:
    hours, rest = divmod(max(0, int(seconds)), 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
