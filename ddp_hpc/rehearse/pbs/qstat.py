"""`qstat [-x] -f -F json JOB`: a job's attributes, with the real one's wobbling types; nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import server


def show(argv: Sequence[str], _environ: Mapping[str, str]) -> None:
    """Prints the job.

    Raises:
        RefusedError: unknown, or finished and asked for without -x.
    """
    options, words = {word for word in argv if word.startswith("-")}, [w for w in argv if w[0] != "-"]
    long = "".join(sorted(options)).replace("-", "")
    if not set(long) <= set("xfF") or "f" not in long or words[:1] != ["json"] or len(words) != 2:
        raise RefusedError("qstat: the stand-in knows `qstat [-x] -f -F json JOB` alone", 99)
    root = server.folder()
    number = server.job_number("qstat", words[1], root)
    job = jobs.load(root, number)
    name = f"{number}.{job['server']}"
    if job["job_state"] == "F" and "x" not in long:
        text = f"qstat: {name} Job has finished, use -x or -H to obtain historical job information"
        raise RefusedError(text, server.FINISHED)
    shown = {key: _wobble(value) for key, value in job.items() if not key.startswith("_")}
    answer = {
        "timestamp": int(time.time()),
        "pbs_version": "23.06.06",
        "pbs_server": job["server"],
        "Jobs": {name: shown},
    }
    json.dump(answer, sys.stdout, indent="\t")
    sys.stdout.write("\n")


def _wobble(value: Any) -> Any:
    """What looks like a number comes as one: `-v foo=005` as 5, `select=1` as 1."""
    if isinstance(value, dict):
        return {key: _wobble(item) for key, item in value.items()}
    if isinstance(value, str):
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(value)
    return value


def main() -> NoReturn:
    """The installed command."""
    server.run(show, sys.argv[1:], os.environ)
