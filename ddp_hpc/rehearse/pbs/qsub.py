"""Stand-in for `qsub`: copies the script, prints the job id, and starts the daemon of the job."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ddp_hpc.base.units import format_walltime
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import server
from ddp_hpc.rehearse.pbs.request import (
    Chunk,
    Request,
    operands,
    place,
    read_request,
    select_of,
    walltime_s,
)
from ddp_hpc.rehearse.pbs.server import Settings

_DEFAULT_QUEUE = "workq"


def main(argv: Sequence[str], environ: Mapping[str, str], root: Path) -> None:
    """Submits a script from a file.

    Raises:
        RefusedError: the script is refused, and nothing was submitted.
    """
    settings = Settings.read(root)
    names = operands(argv)
    if len(names) != 1:
        raise RefusedError("usage: qsub [options] script", 2)
    path = Path(names[0])
    try:
        script = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise RefusedError(f"qsub: script file:: {error.strerror}", 1) from error
    if "\r\n" in script:
        raise RefusedError("qsub: script contains cr, lf", 1)
    request = read_request(argv, script, environ)
    number = jobs.next_number(root / "next_job", settings.first_job)
    job = _attributes(request, settings, root, number, request.name or path.name, argv, environ)
    if request.indices:
        _save_array(root, number, job, script, request)
    else:
        _save(root, number, job, script)
    server.schedule(root)
    sys.stdout.write(f"{number}{'[]' if request.indices else ''}.{settings.server}\n")


def _save(root: Path, number: int, job: jobs.Attributes, script: str) -> None:
    name = server.job_id(number, job["server"])
    jobs.save_script(root / "mom_priv" / "jobs" / f"{name}.SC", script)
    jobs.save(root, number, job)


def _save_array(root: Path, array: int, job: jobs.Attributes, script: str, request: Request) -> None:
    """Saves the subjob that runs in a rehearsal, or all subjobs.

    As in create_subjob of OpenPBS's array_func.c, subjobs do not get the command line of qsub.
    """
    settings = Settings.read(root)
    name = f"{array}[].{settings.server}"
    own = {key: value for key, value in job.items() if key != "Submit_arguments"}
    for index in request.indices if settings.all_tasks else request.indices[:1]:
        logs = {log: f"{job[log]}.{index}" for log in ("Output_Path", "Error_Path")}
        variables = {"PBS_ARRAY_ID": name, "PBS_ARRAY_INDEX": str(index)}
        of_array = {"array_id": name, "array_index": str(index), "_variables_of_array": variables}
        _save(root, server.subjob(array, index), {**own, **logs, **of_array}, script)


def _attributes(
    request: Request,
    settings: Settings,
    root: Path,
    number: int,
    name: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> jobs.Attributes:
    """Returns the attributes that `qstat -f` shows; those that begin with `_` are internal."""
    workdir, host = _workdir(environ), settings.submit_host
    queue = request.attributes.get("queue", _DEFAULT_QUEUE)
    after = [(kind, _number(word)) for kind, word in request.after]
    depend = ",".join(f"{kind}:{before}.{settings.server}@{settings.server}" for kind, before in after)
    waiting = {"job_state": "H", "Hold_Types": "s", "substate": 22, "depend": depend}
    chunks = place(request, settings)
    return {
        "Job_Name": name,
        "Job_Owner": f"{server.USER}@{host}",
        "job_state": "Q",
        "queue": queue,
        "server": settings.server,
        "Error_Path": f"{host}:{_log(request.error, workdir, f'{name}.e{number}', number, 'ER')}",
        "Hold_Types": "n",
        "Join_Path": "n",
        "Keep_Files": "n",
        "Output_Path": f"{host}:{_log(request.output, workdir, f'{name}.o{number}', number, 'OU')}",
        "Rerunable": "True",
        "Resource_List": _resource_list(request, settings, chunks),
        "substate": 10,
        "Variable_List": {**_submit_variables(environ, root, workdir, queue, host), **request.variables},
        "Submit_arguments": shlex.join(argv),
        **request.attributes,
        **(waiting if after else {}),
        "_chunks": [asdict(chunk) for chunk in chunks],
        "_walltime_s": walltime_s(request),
        "_umask": request.umask,
        "_variables_of_array": {},
        "_after": after,
        "_started": False,
    }


def _submit_variables(
    environ: Mapping[str, str], root: Path, workdir: str, queue: str, host: str
) -> dict[str, str]:
    """Returns the variables that qsub adds to the environment of a job."""
    return {
        "PBS_O_HOME": str(root / "home"),
        "PBS_O_LOGNAME": server.USER,
        "PBS_O_PATH": environ.get("PATH", ""),
        "PBS_O_SHELL": "/bin/bash",
        "PBS_O_WORKDIR": workdir,
        "PBS_O_SYSTEM": "Linux",
        "PBS_O_QUEUE": queue,
        "PBS_O_HOST": host,
    }


def _resource_list(request: Request, settings: Settings, chunks: Sequence[Chunk]) -> dict[str, str | int]:
    select = select_of(request)
    resources: dict[str, str | int] = {"place": "free", **request.resources, "select": select}
    resources |= {"ncpus": sum(chunk.ncpus for chunk in chunks), "nodect": len(chunks)}
    if limit_s := settings.walltime_s or walltime_s(request):
        resources["walltime"] = format_walltime(limit_s)
    return resources


def _number(word: str) -> int:
    match = re.match(r"([0-9]{1,6})(?:[.@]|$)", word)
    return int(match[1]) if match else 0


def _workdir(environ: Mapping[str, str]) -> str:
    """Returns the current directory: PWD, which keeps symbolic links, or its real path if PWD is wrong."""
    here = Path.cwd()
    pwd = environ.get("PWD", "")
    return pwd if pwd and Path(pwd).is_dir() and Path(pwd).samefile(here) else str(here)


def _log(path: str, workdir: str, default: str, number: int, ending: str) -> str:
    """Returns the absolute path of a log. As in PBS, nothing is expanded: `~` is an ordinary name."""
    path = os.path.join(workdir, path or default)  # noqa: PTH118 - keeps the final slash of a directory
    return f"{path}{number}.{ending}" if path.endswith("/") else path
