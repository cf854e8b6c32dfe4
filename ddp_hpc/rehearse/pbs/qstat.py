"""Stand-in for `qstat [-x] [-t] -f [-w] [-F json] JOB`: prints the attributes of a job as text or JSON."""

from __future__ import annotations

import getopt
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import server


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> None:
    """Prints the job. For an unknown job, `-F json` prints an object without the key `Jobs`.

    Raises:
        RefusedError: the job is unknown, or it has finished and -x was not given.
    """
    try:
        options, words = getopt.getopt(list(argv), "fxtwF:")
    except getopt.GetoptError:
        options, words = [], []
    flags = dict(options)
    if "-f" not in flags or flags.get("-F", "json") != "json" or len(words) != 1:
        raise RefusedError("qstat: the stand-in supports only `qstat [-x] [-t] -f [-w] [-F json] JOB`", 99)
    try:
        jobs_by_name = _job(root, words[0], with_history="-x" in flags)
    except RefusedError:
        if "-F" in flags:
            _print_json(root, {})
        raise
    if "-F" in flags:
        _print_json(root, {"Jobs": jobs_by_name})
        return
    for name, attributes in jobs_by_name.items():
        # As with -w: the real qstat wraps long lines without it.
        sys.stdout.write("\n".join(_lines(name, attributes)) + "\n\n")


def _job(root: Path, word: str, *, with_history: bool) -> dict[str, jobs.Attributes]:
    """Returns the attributes that are not internal, with the name of the job as the key."""
    number = server.job_number("qstat", word, root)
    job = jobs.load(root, number)
    name = server.job_id(number, job["server"])
    if job["job_state"] == "F" and not with_history:
        text = f"qstat: {name} Job has finished, use -x or -H to obtain historical job information"
        raise RefusedError(text, server.FINISHED)
    return {name: {key: value for key, value in job.items() if not key.startswith("_")}}


def _print_json(root: Path, answer: Mapping[str, object]) -> None:
    version = {"pbs_version": "23.06.06", "pbs_server": server.Settings.read(root).server}
    json.dump({"timestamp": int(time.time()), **version, **answer}, sys.stdout, indent="\t")
    sys.stdout.write("\n")


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
