"""Stand-in for `qsub`: copies the script, prints the job id, and starts the daemon of the job."""

from __future__ import annotations

import getopt
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.job_arrays import rehearsed_index
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import arrays, server
from ddp_hpc.rehearse.pbs.directives import OPTIONS, USAGE, Request, read_request
from ddp_hpc.rehearse.pbs.resources import (
    Chunk,
    check,
    never_runs_reason,
    place,
    select_of,
    walltime_s,
)
from ddp_hpc.rehearse.pbs.server import Settings


def main(argv: Sequence[str], environ: Mapping[str, str], root: Path) -> None:
    """Submits a script from a file or stdin.

    Raises:
        RefusedError: the script is refused, and nothing was submitted.
    """
    server.check_running("qsub", root)
    settings = Settings.read(root)
    operands = _operands(argv)
    if len(operands) > 1:  # like process_opts in qsub.c: a script has no arguments
        raise RefusedError(USAGE, 2)
    script = _script(operands)
    request = read_request(argv, script, environ)
    check(request, settings)
    after = [(kind, _number(word)) for kind, word in request.after]

    number = jobs.next_number(root / "next_job", settings.first_job)
    copy = root / "mom_priv" / "jobs" / f"{number}.{settings.server}.SC"
    jobs.save_script(copy, script)
    name = request.name or (Path(operands[0]).name if operands else "STDIN")
    job = _attributes(request, settings, root, number, name, argv, environ)
    if never := never_runs_reason(request, settings):
        jobs.save(root, number, {**job, "comment": never})
    elif request.indices:
        _submit_array(root, settings, request, number, job)
        sys.stdout.write(f"{number}[].{settings.server}\n")
        return
    elif request.is_held:
        jobs.save(root, number, {**job, "job_state": "H", "Hold_Types": "u"})
    elif after:
        depend = ",".join(f"{kind}:{before}.{settings.server}@{settings.server}" for kind, before in after)
        waits = {"job_state": "H", "Hold_Types": "s", "depend": depend, "substate": 22, "_after": after}
        jobs.save(root, number, {**job, **waits})
        server.depends_on(root, number, after)
    else:
        jobs.save(root, number, job)
        server.start_mom(root, number)
    sys.stdout.write(f"{number}.{settings.server}\n")


def _submit_array(
    root: Path, settings: Settings, request: Request, number: int, job: jobs.Attributes
) -> None:
    """Saves the array and its subjobs, and starts subjobs; a rehearsal has only one subjob."""
    indices, name = request.indices, f"{number}[].{settings.server}"
    logs = ("Output_Path", "Error_Path")
    job = {**job, **{log: f"{job[log]}.^array_index^" for log in logs}}
    own = {key: value for key, value in job.items() if key not in arrays.NOT_COPIED}
    for index in [rehearsed_index(settings, indices)] if settings.any_site else indices:
        subjob = arrays.subjob(number, index)
        copy = root / "mom_priv" / "jobs" / f"{server.job_id(subjob, settings.server)}.SC"
        shutil.copy(root / "mom_priv" / "jobs" / f"{number}.{settings.server}.SC", copy)
        of_array = {"PBS_ARRAY_ID": name, "PBS_ARRAY_INDEX": str(index)}
        jobs.save(root, subjob, {**own, "array_id": name, "array_index": str(index), "_array": of_array})
    if settings.any_site:
        return
    text = f"{indices.start}-{indices.stop - 1}" + (f":{indices.step}" if indices.step > 1 else "")
    limit = {"max_run_subjobs": request.max_running} if request.max_running else {}
    held = {"job_state": "H", "Hold_Types": "u", "substate": 20} if request.is_held else {}
    shown = {"array": "True", "array_indices_submitted": text, **limit, **held}
    jobs.save(root, number, {**job, **shown, "_indices": list(indices), "_max_running": request.max_running})
    server.release(root)


def _operands(argv: Sequence[str]) -> list[str]:
    try:
        return getopt.getopt(list(argv), OPTIONS)[1]
    except getopt.GetoptError:
        return []  # read_request refuses the options and prints the usage


def _script(operands: Sequence[str]) -> str:
    if not operands:
        return sys.stdin.read()
    if Path(operands[0]).is_dir():
        raise RefusedError("qsub: script not a file", 1)
    try:
        return Path(operands[0]).read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise RefusedError(f"qsub: script file:: {error.strerror}", 1) from error


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
    workdir, host, now = _workdir(environ), settings.submit_host, time.ctime()
    queue = request.queue or settings.default_queue
    chunks = place(request, settings)
    return {
        "Job_Name": name,
        "Job_Owner": f"{server.USER}@{host}",
        "job_state": "Q",
        "queue": queue,
        "server": settings.server,
        **({"Account_Name": request.account} if request.account else {}),
        "Checkpoint": "u",
        "ctime": now,
        "mtime": now,
        "qtime": now,
        "etime": now,
        "Error_Path": f"{host}:{_log(request.error, workdir, f'{name}.e{number}', number, 'ER')}",
        "Hold_Types": "n",
        "Join_Path": request.join,
        "Keep_Files": "doe" if settings.alcf_hook else request.keep or "n",
        "Output_Path": f"{host}:{_log(request.output, workdir, f'{name}.o{number}', number, 'OU')}",
        "Mail_Points": request.mail_points,
        **({"Mail_Users": request.mail_users} if request.mail_users else {}),
        "Priority": request.priority,
        **({"group_list": request.group_list} if request.group_list else {}),
        "Rerunable": "True" if request.is_rerunable else "False",
        "Resource_List": _resource_list(request, settings, chunks),
        "substate": 10,
        "Variable_List": {**_submit_variables(environ, root, workdir, queue, host), **request.variables},
        "Submit_arguments": shlex.join(argv),
        "project": "_pbs_project_default",
        "Submit_Host": host,
        **request.attributes,
        "_chunks": [asdict(chunk) for chunk in chunks],
        "_walltime_s": walltime_s(request.resources.get("walltime", "0")),
        "_umask": request.umask,
        "_is_sandboxed": request.is_sandboxed,
        "_array": {},
    }


def _submit_variables(
    environ: Mapping[str, str], root: Path, workdir: str, queue: str, host: str
) -> dict[str, str]:
    """Returns the variables that qsub adds to the environment of a job."""
    return {
        "PBS_O_HOME": str(root / "home"),
        "PBS_O_LOGNAME": server.USER,
        "PBS_O_PATH": environ.get("PATH", ""),
        "PBS_O_MAIL": "/var/mail/pbsuser",
        "PBS_O_SHELL": "/bin/bash",
        "PBS_O_INTERACTIVE_AUTH_METHOD": "resvport",
        "PBS_O_INTERACTIVE_ENCRYPT_METHOD": "",
        "PBS_O_WORKDIR": workdir,
        "PBS_O_SYSTEM": "Linux",
        "PBS_O_QUEUE": queue,
        "PBS_O_HOST": host,
    }


def _resource_list(request: Request, settings: Settings, chunks: Sequence[Chunk]) -> dict[str, str | int]:
    select = select_of(request)
    resources: dict[str, str | int] = {"place": "free", **request.resources, "select": select}
    resources |= _totals(chunks, select)
    if limit_s := settings.walltime_s or walltime_s(request.resources.get("walltime", "0")):
        resources["walltime"] = server.clock(limit_s)
    return resources


def _number(word: str) -> int:
    match = re.match(r"([0-9]{1,6})(?:\[\])?(?:[.@]|$)", word)
    return int(match[1]) if match else 0


def _totals(chunks: Sequence[Chunk], select: str) -> dict[str, int]:
    """Returns the sums over all chunks, without `mpiprocs` and `ngpus` if the job requests none."""
    names = ["ncpus", "ngpus", *(["mpiprocs"] if "mpiprocs=" in select else [])]
    sums = {name: sum(getattr(chunk, name) for chunk in chunks) for name in names}
    return {name: number for name, number in sums.items() if number} | {"nodect": len(chunks)}


def _workdir(environ: Mapping[str, str]) -> str:
    """Returns the current directory: PWD, which keeps symbolic links, or its real path if PWD is wrong."""
    here = Path.cwd()
    pwd = environ.get("PWD", "")
    return pwd if pwd and Path(pwd).is_dir() and Path(pwd).samefile(here) else str(here)


def _log(path: str, workdir: str, default: str, number: int, ending: str) -> str:
    """Returns the absolute path of a log. As in PBS, nothing is expanded: `~` is an ordinary name."""
    path = os.path.join(workdir, path or default)  # noqa: PTH118 - keeps the final slash of a directory
    return f"{path}{number}.{ending}" if path.endswith("/") else path
