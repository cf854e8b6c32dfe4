"""A PBS machine in one folder: commands, settings, and a user with a home and dotfiles."""

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
from ddp_hpc.rehearse.machine import install_pbs, program
from ddp_hpc.rehearse.pbs import server
from ddp_hpc.rehearse.pbs.server import Settings

__all__ = ["PROJECT", "Site", "install", "program", "words_of"]

PROJECT = Path(__file__).resolve().parents[2]

# What the site's modules would do; `module` and `conda` are functions of the login shell there too.
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
    """The machine. Its user submits from `work`, and the job's login shell reads `home/.bash_profile`."""

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
        """The user's `.bash_profile`: these folders first on the PATH, and the site's software functions."""
        folders = ":".join(shlex.quote(str(folder)) for folder in path)
        text = _DOTFILE.format(conda=shlex.quote(str(conda)), path=folders, project=shlex.quote(str(PROJECT)))
        (self.home / ".bash_profile").write_text(text + more)

    def run(
        self,
        *argv: str | Path,
        stdin: str = "",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """A command as the user types it on the login node."""
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
        """The id of a job that qsub took."""
        done = self.run("qsub", *argv, cwd=cwd)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout.removesuffix("\n")

    def requeue(self, job_id: str, grace_s: float = 7.0) -> None:
        """Ends a job and runs it again, as qrerun and preemption do; after a lost node there is no grace."""
        request = jobs.rerun_request(self.root, int(job_id.partition(".")[0]))
        request.with_suffix(".new").write_text(str(grace_s))
        request.with_suffix(".new").replace(request)

    def num_jobs(self) -> int:
        """Jobs ever submitted."""
        return len(jobs.numbers(self.root))

    def job(self, job_id: str) -> dict[str, Any]:
        """A job's attributes from `qstat -xf`; without a history, what PBS itself would have forgotten."""
        if not server.read_settings(self.root).history:
            return jobs.load(self.root, int(job_id.partition(".")[0]))
        done = self.run("qstat", "-xf", "-F", "json", job_id)
        assert done.returncode == 0, done.stderr
        attributes: dict[str, Any] = json.loads(done.stdout)["Jobs"][job_id]
        return attributes

    def wait(self, job_id: str, timeout_s: float = 60.0, states: str = "F") -> dict[str, Any]:
        """A job's attributes once it is over, or in another of these states."""
        end_s = time.monotonic() + timeout_s
        while (job := self.job(job_id))["job_state"] not in states:
            assert time.monotonic() < end_s, f"{job_id} is not over after {timeout_s:g} s\n{self.logs()}"
            time.sleep(0.1)
        return job

    def log(self, job: Mapping[str, Any], name: str = "Output_Path") -> str:
        """What a job has written to where its output goes."""
        return Path(job[name].partition(":")[2]).read_text()

    def logs(self) -> str:
        """Every log there is, for the report of a failed test."""
        found = [*self.work.glob("*.[oe]*[0-9]"), *self.root.glob("spool/*"), *self.root.glob("mom.*.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(found))

    def close(self) -> None:
        """Ends every job; none is left when this returns."""
        server.write_settings(self.root, Settings(keeper_pid=0, obituary_s=0.0))
        end_s = time.monotonic() + 15.0
        while True:
            # Anew each time, as a job may submit another in its last seconds.
            numbers = jobs.numbers(self.root)
            for number in numbers:
                jobs.delete_request(self.root, number).touch()
            if not any(_may_run(jobs.load(self.root, number)) for number in numbers):
                return
            assert time.monotonic() < end_s, self.logs()
            time.sleep(0.05)


def install(root: Path, settings: Settings) -> Site:
    """A machine of these settings below `root`, with an empty home and an empty folder to submit from."""
    site = Site(root)
    for folder in (site.home, site.work, site.pbs_bin, site.pals_bin):
        folder.mkdir(parents=True)
    server.write_settings(root, settings)
    install_pbs(root, site.pbs_bin, site.pals_bin)
    site.dotfile(site.pbs_bin, site.pals_bin)
    return site


def _may_run(job: Mapping[str, Any]) -> bool:
    """True for a job that runs or is about to: one that waits has a comment, and an array is its jobs."""
    if "_indices" in job:
        return False
    return job["job_state"] == "R" or (job["job_state"] == "Q" and "comment" not in job)


def words_of(path: Path) -> Sequence[str]:
    """NUL-separated words, as the recording programs of the tests write them."""
    return [os.fsdecode(word) for word in path.read_bytes().split(b"\0")[:-1]]
