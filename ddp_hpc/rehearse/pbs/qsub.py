"""qsub: reads the script once, keeps a copy, prints the job id alone, and starts the job's mom."""

from __future__ import annotations

import getopt
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import server
from ddp_hpc.rehearse.pbs.directives import OPTIONS, Request, read_request
from ddp_hpc.rehearse.pbs.resources import check, placed, walltime_s, why_never
from ddp_hpc.rehearse.pbs.server import Settings


def submit(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Takes one script, or stdin.

    Raises:
        RefusedError: nothing was submitted.
    """
    root = server.folder()
    settings = server.read_settings(root)
    operands = _operands(argv)
    script = _script(operands)
    request = read_request(argv, script, environ)
    check(request, settings)
    after = [server.job_number("qsub", word, root) for word in request.after]

    number = jobs.next_number(root / "next_job", server.FIRST_JOB)
    copy = root / "mom_priv" / "jobs" / f"{number}.{settings.server}.SC"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(script, encoding="utf-8", errors="surrogateescape")
    copy.chmod(0o700)
    name = request.name or (Path(operands[0]).name if operands else "STDIN")
    job = _attributes(request, settings, number, name, argv, environ)
    if never := why_never(request, settings):
        jobs.save(root, number, {**job, "comment": never})
    elif after:
        depend = "afterany:" + ":".join(f"{before}.{settings.server}@{settings.server}" for before in after)
        waits = {"job_state": "H", "Hold_Types": "s", "depend": depend, "_after": after}
        jobs.save(root, number, {**job, **waits})
        server.release(root)
    else:
        jobs.save(root, number, job)
        server.start_mom(root, number)
    sys.stdout.write(f"{number}.{settings.server}\n")


def _operands(argv: Sequence[str]) -> list[str]:
    try:
        return getopt.getopt(list(argv), OPTIONS)[1]
    except getopt.GetoptError:
        return []  # read_request refuses it with the usage


def _script(operands: Sequence[str]) -> str:
    if not operands:
        return sys.stdin.read()
    try:
        with Path(operands[0]).open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            return file.read()
    except OSError as error:
        raise RefusedError(f"qsub: script file:: {error.strerror}", 1) from error


def _attributes(
    request: Request,
    settings: Settings,
    number: int,
    name: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> jobs.Attributes:
    """The job as `qstat -f` shows it; what starts with `_` is between qsub and its mom."""
    workdir, host = _workdir(environ), socket.gethostname()
    queue = request.queue or settings.default_queue
    user_home = str(server.folder() / "home")
    variables = {
        "PBS_O_HOME": user_home,
        "PBS_O_LOGNAME": "pbsuser",
        "PBS_O_PATH": environ.get("PATH", ""),
        "PBS_O_MAIL": "/var/mail/pbsuser",
        "PBS_O_SHELL": "/bin/bash",
        "PBS_O_INTERACTIVE_AUTH_METHOD": "resvport",
        "PBS_O_INTERACTIVE_ENCRYPT_METHOD": "",
        "PBS_O_WORKDIR": workdir,
        "PBS_O_SYSTEM": "Linux",
        "PBS_O_QUEUE": queue,
        "PBS_O_HOST": host,
        **request.variables,
    }
    resources = {"select": "1", "place": "free", **request.resources}
    now = time.ctime()
    return {
        "Job_Name": name,
        "Job_Owner": f"pbsuser@{host}",
        "job_state": "Q",
        "queue": queue,
        "server": settings.server,
        **({"Account_Name": request.account} if request.account else {}),
        "ctime": now,
        "qtime": now,
        "Error_Path": f"{host}:{_log(request.error, workdir, f'{name}.e{number}', number, 'ER')}",
        "Hold_Types": "n",
        "Join_Path": request.join,
        "Keep_Files": "doe" if settings.alcf_hook else request.keep or "n",
        "Output_Path": f"{host}:{_log(request.output, workdir, f'{name}.o{number}', number, 'OU')}",
        "Resource_List": {**resources, "nodect": len({chunk.node for chunk in placed(request, settings)})},
        "substate": 10,
        "Variable_List": variables,
        "Submit_arguments": shlex.join(argv),
        "_chunks": [asdict(chunk) for chunk in placed(request, settings)],
        "_walltime_s": walltime_s(request.resources.get("walltime", "0")),
        "_umask": request.umask,
        "_variables": request.variables,
    }


def _workdir(environ: Mapping[str, str]) -> str:
    """The shell's spelling of the folder where that is right, as a link should stay a link."""
    here = Path.cwd()
    said = environ.get("PWD", "")
    return said if said and Path(said).is_dir() and Path(said).samefile(here) else str(here)


def _log(asked: str, workdir: str, default: str, number: int, ending: str) -> str:
    """Nothing is expanded: `~/x` is a folder named `~`."""
    path = os.path.join(workdir, asked or default)  # noqa: PTH118 - a trailing slash means a folder
    return f"{path}{number}.{ending}" if path.endswith("/") else path


def main() -> NoReturn:
    """The installed command."""
    server.run(submit, sys.argv[1:], os.environ)
