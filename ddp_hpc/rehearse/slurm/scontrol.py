"""Stand-in for `scontrol requeue JOB`, `show hostnames [LIST]`, `show job JOB` and `show step JOB`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.slurm import controller


def main(argv: Sequence[str], environ: Mapping[str, str], root: Path) -> int:
    """Executes one command of scontrol.

    Raises:
        RefusedError: the command is not supported, or it fails.
    """
    words = [word for word in argv if word not in ("-o", "--oneliner")]
    match words:
        case ["requeue", job]:
            _requeue(job, root)
        case ["show", "hostnames" | "hostname", *lists]:
            _hostnames(lists[0] if lists else environ.get("SLURM_JOB_NODELIST", ""))
        case ["show", "job" | "jobs", job]:
            _show(job, root, one_line=len(words) != len(argv))
        case ["show", "step" | "steps", job]:
            # Only steps whose srun was killed are of interest. Here, all ranks end with their srun.
            jobs.find_job(job, root, "slurm_load_jobs error: Invalid job id specified")
        case [] | ["show", *_]:
            raise RefusedError("scontrol: the stand-in does not support this command")
        case [word, *_]:
            raise RefusedError(f"invalid keyword: {word}")
    return 0


def _requeue(word: str, root: Path) -> None:
    number = jobs.find_job(word, root, f"Invalid job id specified for job {word}")
    job = jobs.load(root, number)
    if not job["requeue"]:
        raise RefusedError(f"Requested operation is presently disabled for job {number}")
    if job["state"] != "RUNNING":
        raise RefusedError(f"Job is pending execution for job {number}")
    jobs.rerun_request(root, number).touch()


def _hostnames(text: str) -> None:
    # This parser also accepts host names that do not exist on this machine.
    from ddp_hpc.base.errors import LaunchError
    from ddp_hpc.base.hostlist import expand_hostlist

    try:
        sys.stdout.write("".join(f"{host}\n" for host in expand_hostlist(text)))
    except LaunchError:
        raise RefusedError(f"Invalid hostlist: {text}") from None


def _show(word: str, root: Path, *, one_line: bool) -> None:
    number = jobs.find_job(word, root, "slurm_load_jobs error: Invalid job id specified")
    job = jobs.load(root, number)
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(job["end"])) if job.get("end") else "Unknown"
    values = {
        "JobId": number,
        "JobName": job["name"],
        "JobState": job["state"],
        "Reason": job["reason"],
        "Requeue": int(job["requeue"]),
        "Restarts": max(0, job["runs"] - 1),
        "ExitCode": job.get("exit_code", "0:0"),
        "EndTime": end,
        "Partition": job["partition"],
        "NodeList": controller.hostlist(job["nodes"]),
        "NumNodes": len(job["nodes"]),
        "WorkDir": job["workdir"],
    }
    sys.stdout.write((" " if one_line else "\n   ").join(f"{k}={v}" for k, v in values.items()) + "\n")
