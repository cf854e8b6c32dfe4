"""A simulated PBS machine in one directory: commands, settings, and a user's home with dotfiles."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.base import process_control
from ddp_hpc.base.units import format_walltime
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.install_stand_ins import install_mpiexec, program
from ddp_hpc.rehearse.launchers.failure import down_file
from ddp_hpc.rehearse.pbs import server
from ddp_hpc.rehearse.pbs.rehearsal_adapter import STAND_IN
from tests.waiting import PATIENCE

__all__ = ["PROJECT", "Site", "install", "program", "words_of"]

PROJECT = Path(__file__).resolve().parents[2]
NODES = ("x3001c0s1b0n0.hsn.cm.pbs.lab", "x3001c0s1b1n0.hsn.cm.pbs.lab")

# The mpiexec of PBS, which is not an MPI launcher although it accepts --version (OpenPBS's
# src/cmds/mpiexec.in).
PBS_MPIEXEC = """#!/bin/sh
if [ $# -eq 1 ] && [ "$1" = "--version" ]; then
  echo pbs_version = 23.06.06
  exit 0
fi
echo "mpiexec:  unexpected error - no non-PBS mpiexec in PBS_O_PATH" >&2
exit 1
"""

# A command of PBS: the stand-in of `ddp-hpc rehearse`, with the faults that tests plant.
_COMMAND = """#!/bin/bash
if [[ -e {root}/server_is_down ]]; then
  printf 'Connection refused\n{name}: cannot connect to server pbs-srv (errno=111)\n' >&2
  exit {code}
fi
if [[ {name} == qstat && ${{!#}} == *"[]"* && -e {root}/submitted_array ]]; then
  printf 'Job Id: %s\n    Submit_arguments = %s\n' "${{!#}}" "$(<{root}/submitted_array)"
  exit 0
fi
exec {real}/{name} "$@"
"""
# A server that does not keep finished jobs (job_history_enable).
_QSTAT_WITHOUT_HISTORY = """#!/bin/bash
if [[ $1 == -x* ]]; then
  echo '{{}}'
  echo "qstat: PBS is not configured to maintain job history ${{!#}}" >&2
  exit 0
fi
{real}/qstat "$@" || {{ echo "qstat: Unknown Job Id ${{!#}}" >&2; exit 153; }}
"""
# Stand-ins for `module` and `conda`, which are functions of the login shell at real sites too.
_DOTFILE = """module() {{ echo "module $*" >>"$HOME/software.log"; }}
conda() {{
  echo "conda $*" >>"$HOME/software.log"
  export CONDA_PREFIX={conda} PATH={conda}/bin:$PATH
}}
export -f module conda
export PATH={path}:$PATH PYTHONPATH={project}
"""


@dataclass(frozen=True)
class Site:
    """The machine.

    Its user submits jobs from `work`, and the jobs' login shells read `home/.bash_profile`.
    """

    root: Path

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def pbs_bin(self) -> Path:
        return self.root / "opt" / "pbs" / "bin"

    @property
    def pals_bin(self) -> Path:
        return self.root / "opt" / "cray" / "pals" / "bin"

    def dotfile(self, *path: Path, conda: Path = Path(sys.prefix), more: str = "") -> None:
        """Writes the user's `.bash_profile`: `path` first on the PATH, and the site's module functions."""
        # The supervisor needs Python, but this machine's own directory of Python has an mpiexec, too.
        python = program(self.root / "python" / "python", f'#!/bin/bash\nexec {sys.executable} "$@"\n')
        folders = ":".join(shlex.quote(str(folder)) for folder in [*path, python.parent])
        text = _DOTFILE.format(conda=shlex.quote(str(conda)), path=folders, project=shlex.quote(str(PROJECT)))
        (self.home / ".bash_profile").write_text(text + more)

    def run(
        self,
        *argv: str | Path,
        stdin: str = "",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command as the user would on the login node."""
        login = {
            "PATH": f"{self.pbs_bin}:/usr/bin:/bin",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "SUBMITTER": "does not reach the job",
            **(env or {}),
        }
        words = [str(word) for word in argv]
        folder = cwd or self.work
        return subprocess.run(
            words, cwd=folder, env=login, input=stdin, capture_output=True, text=True, timeout=60
        )

    def submit(self, *argv: str | Path, cwd: Path | None = None) -> str:
        """Submits a job with qsub and returns its ID."""
        if "-J" in argv:  # for qstat, as the stand-in has no record of the whole array
            (self.root / "submitted_array").write_text(shlex.join(map(str, argv)))
        done = self.run("qsub", *argv, cwd=cwd)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout.removesuffix("\n")

    @property
    def server_is_down(self) -> Path:
        """While this file exists, the commands cannot reach the server."""
        return self.root / "server_is_down"

    def lose(self, node: str) -> Path:
        """Tells the daemons of PBS that a node is down, until the returned file is removed."""
        file = down_file(self.root, node)
        file.parent.mkdir(exist_ok=True)
        file.touch()
        return file

    def requeue(self, job_id: str, grace_s: float = 7.0) -> None:
        """Ends a job and runs it again, as after qrerun or preemption. A lost node gives no grace period."""
        request = jobs.rerun_request(self.root, server.job_number("", job_id, self.root))
        request.with_suffix(".new").write_text(str(grace_s))
        request.with_suffix(".new").replace(request)

    def signal(self, job_id: str, number: int) -> None:
        """Sends a signal to all processes of the job's session, as qsig does."""
        process_control.send(number, process_control.of_session(self.job(job_id)["session_id"]))

    def change_walltime(self, job_id: str, limit_s: int) -> None:
        """Changes the walltime of a job, as `qalter -l walltime` does."""
        number = server.job_number("", job_id, self.root)
        resources = {**jobs.load(self.root, number)["Resource_List"], "walltime": format_walltime(limit_s)}
        jobs.change(self.root, number, _walltime_s=limit_s, Resource_List=resources)

    def num_jobs(self) -> int:
        """Returns the number of jobs that were ever submitted."""
        return len(jobs.numbers(self.root))

    def job(self, job_id: str) -> dict[str, Any]:
        """Returns a job's attributes, also if the server keeps no job history."""
        return jobs.load(self.root, server.job_number("", job_id, self.root))

    def wait(self, job_id: str, timeout_s: float = 60.0, states: str = "F") -> dict[str, Any]:
        """Waits until a job has ended, or is in one of `states`, and returns its attributes."""
        end_s = time.monotonic() + PATIENCE * timeout_s
        while (job := self.job(job_id))["job_state"] not in states:
            assert time.monotonic() < end_s, (
                f"{job_id} is not over after {PATIENCE * timeout_s:g} s\n{self.logs()}"
            )
            time.sleep(0.05)
        return job

    def log(self, job: Mapping[str, Any], name: str = "Output_Path") -> str:
        """Returns the content of a job's output or error file."""
        return Path(job[name].partition(":")[2]).read_text()

    def logs(self) -> str:
        """Returns the content of all logs, for the message of a failed test."""
        found = [*self.work.glob("*.[oe]*[0-9]"), *self.root.glob("spool/*"), *self.root.glob("mom.*.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(found))

    def close(self) -> None:
        """Ends all jobs, and waits for their end."""
        end_s = time.monotonic() + PATIENCE * 15.0
        while True:
            # The list is read again each time, because a job may submit another one shortly before its end.
            with jobs.locked(self.root / "schedule.lock"):
                ended = [self._is_ended(number) for number in jobs.numbers(self.root)]
            if all(ended):
                return
            assert time.monotonic() < end_s, self.logs()
            time.sleep(0.05)

    def _is_ended(self, number: int) -> bool:
        job = jobs.load(self.root, number)
        if job["_started"]:
            jobs.delete_request(self.root, number).touch()
        elif job["job_state"] != "F":
            jobs.change(self.root, number, job_state="F")
        return not job["_started"] or job["job_state"] not in "QR"


def install(root: Path, *, history: bool = True, **settings: Any) -> Site:
    """Creates a machine with these settings below `root`, with an empty home and an empty work directory."""
    site = Site(root)
    for folder in (site.home, site.work, site.pbs_bin, site.pals_bin):
        folder.mkdir(parents=True)
    known = {"server": "pbs-srv", "first_job": 12, "nodes": NODES, "all_tasks": True}
    server.Settings(**{**known, "keeper_pid": os.getpid(), **settings}).write(root)
    real = root / "opt" / "pbs" / "real"
    STAND_IN.install(root, real)
    for name in STAND_IN.commands:
        code = 255 if name == "qstat" else 111
        program(site.pbs_bin / name, _COMMAND.format(root=root, name=name, code=code, real=real))
    if not history:
        program(site.pbs_bin / "qstat", _QSTAT_WITHOUT_HISTORY.format(real=real))
    program(site.pbs_bin / "mpiexec", PBS_MPIEXEC)
    install_mpiexec(root, site.pals_bin, "pals")
    site.dotfile(site.pbs_bin, site.pals_bin)
    return site


def words_of(path: Path) -> Sequence[str]:
    """Returns the NUL-separated words that a recording program of the tests has written."""
    return [os.fsdecode(word) for word in path.read_bytes().split(b"\0")[:-1]]
