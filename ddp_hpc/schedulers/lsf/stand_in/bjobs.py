"""Stand-in for `bjobs [-noheader] [-json] [-o "FIELD ... [delimiter='C']"] JOB`: prints fields of a job."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError, Table, read_line, spellings
from ddp_hpc.schedulers.lsf.stand_in import cluster
from ddp_hpc.schedulers.lsf.stand_in.cluster import REFUSED

_TABLE = Table(
    values=spellings("o"),
    bare=spellings("noheader json"),
    bad_option="bjobs: the stand-in does not support {word}",
    exit_codes=(REFUSED, REFUSED),
)
_DEFAULT = "jobid user stat queue exec_host job_name"


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> int:
    """Prints the fields of the job.

    Raises:
        RefusedError: the job is unknown, or the stand-in does not support an option.
    """
    line = read_line(argv, _TABLE)
    words, format_, flags = line.command, line.values.get("o", _DEFAULT), line.flags
    delimiter = re.search(r"delimiter='(.)'", format_)
    names = re.sub(r"delimiter='.'", "", format_).split()
    if len(words) != 1:
        raise RefusedError("bjobs: the stand-in shows one job at a time", REFUSED)
    try:
        number = jobs.find_job(words[0], root, f"Job <{words[0]}> is not found", REFUSED)
    except RefusedError as error:
        if "json" in flags:
            record = {"JOBID": words[0], "ERROR": str(error)}
            sys.stdout.write(json.dumps({"COMMAND": "bjobs", "JOBS": 1, "RECORDS": [record]}, indent=2))
        raise
    known = fields(number, jobs.load(root, number))
    if unknown := [name for name in names if name not in known]:
        raise RefusedError(f"bjobs: the stand-in has no field {unknown[0]}", REFUSED)
    if "json" in flags:
        record = {name.upper(): known[name] for name in names}
        sys.stdout.write(json.dumps({"COMMAND": "bjobs", "JOBS": 1, "RECORDS": [record]}, indent=2) + "\n")
        return 0
    separator = delimiter[1] if delimiter else " "
    if "noheader" not in flags:
        sys.stdout.write(f"{separator.join(name.upper() for name in names)}\n")
    sys.stdout.write(f"{separator.join(known[name] or '-' for name in names)}\n")
    return 0


def fields(number: int, job: jobs.Attributes) -> dict[str, str]:
    """Returns the fields of `bjobs -o` by name, as text."""
    is_over, start, limit_s = job["stat"] in cluster.OVER, job["start"], job["walltime_s"]
    used_s = int((job["end"] if is_over else time.time()) - start) if start else 0
    left_m = max(0, limit_s - used_s) // 60
    has_limit = bool(limit_s and start and not is_over)
    hosts = [f"{count}*{node}" for node, count in zip(job["nodes"], job["slots"], strict=True)]
    return {
        "jobid": str(number),
        "stat": job["stat"],
        "user": job["user"],
        "queue": job["queue"],
        "job_name": job["name"],
        "exec_host": ":".join(hosts) if start else "",
        "run_time": f"{used_s} second(s)",
        "runtimelimit": f"{limit_s / 60:.1f}" if limit_s else "",
        "time_left": f"{left_m // 60}:{left_m % 60:02} L" if has_limit else "",
        "pend_reason": job["pend_reason"],
        "kill_reason": "",
        "exit_reason": job["exit_reason"],
        "exit_code": "" if not job["exit_code"] else str(job["exit_code"]),
        "output_file": job["output"],
        "error_file": "",
        "exec_cwd": job["cwd"] if start else "",
        "sub_cwd": job["cwd"].replace(f"{Path.home()}/", "$HOME/", 1),
    }
