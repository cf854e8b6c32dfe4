"""Stand-in for `qstat [-x] [-t] -f [-w] [-F json] JOB`: prints the attributes of jobs as text or JSON."""

from __future__ import annotations

import getopt
import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import arrays, server

# According to qstat.c, the values of these attributes are always strings.
_TEXT = ("Job_Name", "project", "Account_Name")
_NUMBER = re.compile(r"-?[0-9.]+(?:[eE][+-]?[0-9]+)?")
_LINE_CHARS = 78
_MAX_INT = 2**31


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> None:
    """Prints the job. For an unknown job, `-F json` prints an object without the key `Jobs`.

    Raises:
        RefusedError: the job is unknown, or it has finished and -x was not given.
    """
    server.check_running("qstat", root)
    try:
        options, words = getopt.getopt(list(argv), "fxtwF:")
    except getopt.GetoptError:
        options, words = [], []
    flags = dict(options)
    if "-f" not in flags or flags.get("-F", "json") != "json" or len(words) != 1:
        raise RefusedError("qstat: the stand-in supports only `qstat [-x] [-t] -f [-w] [-F json] JOB`", 99)
    frame = {
        "timestamp": int(time.time()),
        "pbs_version": "23.06.06",
        "pbs_server": server.Settings.read(root).server,
    }
    try:
        found = _jobs(root, words[0], with_history="-x" in flags, with_subjobs="-t" in flags)
    except RefusedError:
        if "-F" in flags:
            _print(frame)
        raise
    shown = {
        name: {key: value for key, value in job.items() if not key.startswith("_")} for name, job in found
    }
    if "-F" in flags:
        typed = {name: {key: _typed(key, one) for key, one in job.items()} for name, job in shown.items()}
        _print({**frame, "Jobs": typed})
        return
    for name, job in shown.items():
        sys.stdout.write("\n".join(_lines(name, job, is_wide="-w" in flags)) + "\n\n")


def _jobs(
    root: Path, word: str, *, with_history: bool, with_subjobs: bool
) -> list[tuple[str, jobs.Attributes]]:
    settings = server.Settings.read(root)
    if not word[:1].isdecimal():
        raise RefusedError(f"qstat: Unknown queue {word}", server.UNKNOWN_QUEUE)
    if with_history and not settings.history:
        name = f"{word.partition('.')[0]}.{settings.server}"
        raise RefusedError(f"qstat: PBS is not configured to maintain job history {name}", 0)
    number = server.job_number("qstat", word, root)
    job = jobs.load(root, number)
    name = server.job_id(number, job["server"])
    found = []
    if "_indices" in job:
        name = name.replace(".", "[].", 1)
        found = [arrays.subjob(number, index) for index in job["_indices"]] if with_subjobs else []
        job = arrays.state(root, number, job)
    elif arrays.array_of(number)[0]:
        job = arrays.shown_subjob(root, number, history=settings.history)
    if job["job_state"] == "F" and not with_history:
        text = f"qstat: {name} Job has finished, use -x or -H to obtain historical job information"
        raise RefusedError(text, server.FINISHED)
    subjobs = [
        (server.job_id(one, job["server"]), arrays.shown_subjob(root, one, history=settings.history))
        for one in found
    ]
    return [(name, job), *subjobs]


def _print(answer: Mapping[str, Any]) -> None:
    json.dump(answer, sys.stdout, indent="\t")
    sys.stdout.write("\n")


def _typed(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _parsed(one) for name, one in value.items()}
    return value if key in _TEXT else _parsed(value)


def _parsed(value: Any) -> Any:
    """Converts text that is a JSON value, as cJSON does: `005` to 5, `1e3` to 1000, `1e400` to null."""
    if not isinstance(value, str):
        return value
    if _NUMBER.fullmatch(value):
        with suppress(ValueError):
            number = float(value)
            if not math.isfinite(number):
                return None
            return int(number) if number == int(number) and abs(number) < _MAX_INT else number
        return value
    if value[:1] in ('"', "[", "{", "t", "f", "n"):
        with suppress(ValueError):
            return json.loads(value, parse_constant=_no_constant)
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _lines(name: str, job: Mapping[str, Any], *, is_wide: bool) -> list[str]:
    """Returns the text output, with each attribute wrapped as in prt_attr of qstat.c."""
    lines = [f"Job Id: {name}"]
    for key, value in job.items():
        if key == "Variable_List":
            pairs = (f"{one}={_escaped(str(text))}" for one, text in value.items())
            lines.append(_wrapped(key, ",".join(pairs), is_wide=is_wide))
        elif isinstance(value, dict):
            lines += [_wrapped(f"{key}.{one}", str(text), is_wide=is_wide) for one, text in value.items()]
        else:
            lines.append(_wrapped(key, str(value), is_wide=is_wide))
    return lines


def _escaped(text: str) -> str:
    return re.sub(r"""([\\,'"])""", r"\\\1", text).replace("\n", r"\n")


def _wrapped(key: str, value: str, *, is_wide: bool) -> str:
    line = f"    {key} = "
    if is_wide:
        return line + value
    column = len(line)
    for index, part in enumerate(value.split(",")):
        if index:
            line += ","
        if len(part) + column < _LINE_CHARS:
            line, column = line + part, column + len(part)
            continue
        if index:
            line, column = f"{line}\n\t", 9
        for char in part:
            line, column = line + char, column + 1
            if column > _LINE_CHARS:
                line, column = f"{line}\n\t", 8
    return line
