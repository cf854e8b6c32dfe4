"""Stand-in for `bsub`: reads a script from stdin, saves a copy, prints the job id, and queues the job."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.job_arrays import rehearsed_index
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.schedulers.lsf.stand_in import cluster, parse_requests
from ddp_hpc.schedulers.lsf.stand_in.cluster import REFUSED

_NOT_DONE = ("-I", "-Ip", "-Is", "-K", "-b", "-Q", "-H", "-i", "-is", "-E", "-Ep", "-pack")


def main(argv: Sequence[str], environ: Mapping[str, str], root: Path) -> int:
    """Queues the script that stdin contains.

    Raises:
        RefusedError: the request is invalid, and nothing was queued.
    """
    os.umask(0o022)
    settings = cluster.Settings.read(root)
    script = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    typed = parse_requests.options(argv)
    given = parse_requests.merged(parse_requests.directives(script), typed)
    for flag in _NOT_DONE:
        if flag in given:
            raise RefusedError(f"bsub: the stand-in does not support {flag}", REFUSED)
    if not script.strip():
        raise RefusedError("No command is specified. Job not submitted.", REFUSED)
    name, indices = parse_requests.name_and_indices(given.get("-J", ""))
    walltime_s = parse_requests.walltime_s(given.get("-W", ""))
    slots = parse_requests.slots_per_node(given)
    condition, after = _dependency(given.get("-w", ""), root)
    number = jobs.next_number(root / "next_job", settings.first_job)
    file = root / "home" / ".lsbatch" / f"{int(time.time())}.{number}"
    # The copy of the script is executed directly, because its first line can name any shell.
    jobs.save_script(file.with_name(f"{file.name}.shell"), script)
    here = settings.nodes[: len(slots)]
    job = {
        "stat": "PEND",
        "pend_reason": cluster.DEPENDENCY if after else "",
        "exit_reason": "",
        "exit_code": None,
        "name": name or script.split("\n", 1)[0],
        "user": environ.get("USER", "user"),
        "queue": given.get("-q", settings.queue),
        "project": given.get("-P", "default"),
        "file": str(file),
        "cwd": str(Path(environ.get("PWD", ".")).absolute()),
        "output": given.get("-o") or given.get("-oo", ""),
        "overwrites": "-oo" in given,
        "nodes": list(here),
        "slots": slots[: len(here)],
        "num_slots": sum(slots),
        "whole_nodes": "-nnodes" in given,
        "walltime_s": settings.walltime_s or walltime_s,
        "condition": condition,
        "after": after,
        "is_started": False,
        **({"array_index": rehearsed_index(settings, indices)} if indices else {}),
        "start": 0.0,
        "end": 0.0,
        "environment": dict(environ),
    }
    jobs.save(root, number, job)
    kind = "" if "-q" in given else "default "
    sys.stdout.write(f"Job <{number}> is submitted to {kind}queue <{job['queue']}>.\n")
    return 0


def _dependency(text: str, root: Path) -> tuple[str, int]:
    """Returns the condition of `-w`, such as ended, and the number of the job; 0 without a dependency."""
    if not text:
        return "", 0
    match = re.fullmatch(r"[\"']?(ended|done|exit)\((\d{1,9})\)[\"']?", text)
    if match is None:
        raise RefusedError(f"bsub: the stand-in does not support -w {text}", REFUSED)
    message = f"{text}: No matching job found. Job not submitted."
    return match[1], jobs.find_job(match[2], root, message, REFUSED)
