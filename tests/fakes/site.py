"""A simulated PBS machine in one directory: commands, settings, and a user's home with dotfiles."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.install_stand_ins import install_mpiexec, program
from ddp_hpc.rehearse.pbs import arrays
from ddp_hpc.rehearse.pbs.rehearsal_adapter import STAND_IN
from ddp_hpc.rehearse.pbs.server import Settings

__all__ = ["PROJECT", "Site", "install", "program", "words_of"]

PROJECT = Path(__file__).resolve().parents[2]

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
        done = self.run("qsub", *argv, cwd=cwd)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout.removesuffix("\n")

    def requeue(self, job_id: str, grace_s: float = 7.0) -> None:
        """Ends a job and runs it again, as after qrerun or preemption. A lost node gives no grace period."""
        request = jobs.rerun_request(self.root, int(job_id.partition(".")[0]))
        request.with_suffix(".new").write_text(str(grace_s))
        request.with_suffix(".new").replace(request)

    def num_jobs(self) -> int:
        """Returns the number of jobs that were ever submitted."""
        return len(jobs.numbers(self.root))

    def job(self, job_id: str) -> dict[str, Any]:
        """Returns a job's attributes from `qstat -xf`, also if the server keeps no job history."""
        if not Settings.read(self.root).history:
            number, _, index = job_id.partition(".")[0].removesuffix("]").partition("[")
            return jobs.load(self.root, arrays.subjob(int(number), int(index)) if index else int(number))
        done = self.run("qstat", "-xf", "-F", "json", job_id)
        assert done.returncode == 0, done.stderr
        attributes: dict[str, Any] = json.loads(done.stdout)["Jobs"][job_id]
        return attributes

    def wait(self, job_id: str, timeout_s: float = 60.0, states: str = "FX") -> dict[str, Any]:
        """Waits until a job has ended, or is in one of `states`, and returns its attributes."""
        end_s = time.monotonic() + timeout_s
        while (job := self.job(job_id))["job_state"] not in states:
            assert time.monotonic() < end_s, f"{job_id} is not over after {timeout_s:g} s\n{self.logs()}"
            time.sleep(0.1)
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
        Settings(keeper_pid=0, obituary_s=0.0).write(self.root)
        end_s = time.monotonic() + 15.0
        while True:
            # The list is read again each time, because a job may submit another one shortly before its end.
            numbers = jobs.numbers(self.root)
            for number in numbers:
                jobs.delete_request(self.root, number).touch()
            if not any(_may_run(jobs.load(self.root, number)) for number in numbers):
                return
            assert time.monotonic() < end_s, self.logs()
            time.sleep(0.05)


def install(root: Path, settings: Settings) -> Site:
    """Creates a machine with these settings below `root`, with an empty home and an empty work directory."""
    site = Site(root)
    for folder in (site.home, site.work, site.pbs_bin, site.pals_bin):
        folder.mkdir(parents=True)
    settings.write(root)
    STAND_IN.install(root, site.pbs_bin)
    install_mpiexec(root, site.pals_bin, "pals")
    site.dotfile(site.pbs_bin, site.pals_bin)
    return site


def _may_run(job: Mapping[str, Any]) -> bool:
    """Returns whether a job runs or can start at once. A job that must wait has a comment."""
    if "_indices" in job or ("array_index" in job and arrays.is_waiting(job)):
        return False
    return job["job_state"] == "R" or (job["job_state"] == "Q" and "comment" not in job)


def words_of(path: Path) -> Sequence[str]:
    """Returns the NUL-separated words that a recording program of the tests has written."""
    return [os.fsdecode(word) for word in path.read_bytes().split(b"\0")[:-1]]
