"""Stand-in for `qstat [-x] [-t] -f [-w] JOB`: prints the attributes of a job."""

from __future__ import annotations

import getopt
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import server


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> None:
    """Prints the job.

    Raises:
        RefusedError: the job is unknown, or it has finished and -x was not given.
    """
    try:
        options, words = getopt.getopt(list(argv), "fxtw")
    except getopt.GetoptError:
        options, words = [], []
    flags = dict(options)
    if "-f" not in flags or len(words) != 1:
        raise RefusedError("qstat: the stand-in supports only `qstat [-x] [-t] -f [-w] JOB`", 99)
    name, attributes = _job(root, words[0], with_history="-x" in flags)
    # As with -w: the real qstat wraps long lines without it.
    sys.stdout.write("\n".join(_lines(name, attributes)) + "\n\n")


def _job(root: Path, word: str, *, with_history: bool) -> tuple[str, jobs.Attributes]:
    """Returns the name of the job, and its attributes that are not internal."""
    number = server.job_number("qstat", word, root)
    job = jobs.load(root, number)
    name = server.job_id(number, job["server"])
    if job["job_state"] == "F" and not with_history:
        text = f"qstat: {name} Job has finished, use -x or -H to obtain historical job information"
        raise RefusedError(text, server.FINISHED)
    return name, {key: value for key, value in job.items() if not key.startswith("_")}


def _lines(name: str, job: jobs.Attributes) -> list[str]:
    lines = [f"Job Id: {name}"]
    for key, value in job.items():
        if key == "Variable_List":
            pairs = ",".join(f"{variable}={_escaped(str(text))}" for variable, text in value.items())
            lines.append(f"    {key} = {pairs}")
        elif isinstance(value, dict):
            lines += [f"    {key}.{name} = {text}" for name, text in value.items()]
        else:
            lines.append(f"    {key} = {value}")
    return lines


def _escaped(text: str) -> str:
    return re.sub(r"""([\\,'"])""", r"\\\1", text).replace("\n", r"\n")
