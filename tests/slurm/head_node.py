"""What a user of the test cluster does on its head node: run commands, submit jobs, wait for them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import nodes
from .configuration import HEAD, Layout
from .nodes import ClusterError, wait_for

_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
}


@dataclass(frozen=True)
class JobEnd:
    """How a job ended: Slurm's word, and the code as a shell shows it (128 + the signal's number)."""

    state: str
    exit_code: int


class HeadNode:
    """The commands of a user who is logged in on the head node of a cluster that is up."""

    _layout: Layout | None = None

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            raise ClusterError("the cluster is not up")
        return self._layout

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """A user's clean login, with this Python's environment active, plus `extra`.

        Nothing of the caller's own environment: its SLURM_* or PMI_* would be taken for the cluster's.
        """
        return {
            "PATH": f"{Path(sys.executable).parent}:{nodes.SYSTEM_PATH}",
            "HOME": str(self.layout.home),
            "LANG": "C.UTF-8",
            "SHELL": "/bin/bash",
            "USER": "root",
            "LOGNAME": "root",
            "SLURM_CONF": str(self.layout.conf),
            **(extra or {}),
        }

    def command(
        self, argv: Sequence[str | Path], *, node: str = HEAD, cwd: Path | str | None = None
    ) -> list[str]:
        """argv as it has to be started from outside to run on a node; start it with `environment()`."""
        return [*nodes.enter(self.layout, node, cwd or self.layout.home), *map(str, argv)]

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        node: str = HEAD,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        stdin: str = "",
        timeout: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the head node, or another, and return its code and its output as text.

        `env` is added to `environment()`; `cwd` is the home folder if not given.

        Raises:
            subprocess.TimeoutExpired: after `timeout` seconds, the command having been ended.
        """
        words = [str(word) for word in argv]
        with subprocess.Popen(
            self.command(words, node=node, cwd=cwd),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(env),
        ) as process:
            try:
                out, err = process.communicate(stdin, timeout=timeout)
            except subprocess.TimeoutExpired:
                out, err = _end(process, patience_s=self.layout.settings.kill_wait_s + 5)
                raise subprocess.TimeoutExpired(words, timeout, out, err) from None
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def sbatch(
        self,
        script: Path | str,
        *args: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
    ) -> str:
        """Submit a script, a Path to one or its text as str, and return the job id.

        Raises:
            ClusterError: with sbatch's words, where it refuses.
        """
        file, text = ([script], "") if isinstance(script, Path) else ([], script)
        done = self.run(["sbatch", "--parsable", *args, *file], env=env, cwd=cwd, stdin=text, timeout=60)
        if done.returncode:
            raise ClusterError(f"sbatch: {done.stderr.strip()}")
        return done.stdout.strip().partition(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """What the controller knows of one job, in scontrol's names.

        Raises:
            ClusterError: for an unknown job, and for an array, whose elements are asked for as ID_INDEX.
        """
        text = self._ask("scontrol", "--oneliner", "show", "job", job_id).strip()
        if "\n" in text:
            raise ClusterError(f"job {job_id} is an array; ask for one element, such as {job_id}_0")
        return dict(re.findall(r"(\S+?)=(.*?)(?= \S+=| *$)", text))

    def wait(self, job_id: str, timeout: float = 120.0, *, requeues_at_once: bool = False) -> JobEnd:
        """How a job ended, as soon as it has. `sbatch --wait` would notice up to 32 s late.

        `requeues_at_once`: whenever it is requeued it starts at once.

        Raises:
            ClusterError: after `timeout` seconds, with the job's state and output; the job is cancelled.
        """

        def ended() -> dict[str, str]:
            job = self.job(job_id)
            if requeues_at_once:
                self.start_requeued(job_id)
            return job if job["JobState"] in _ENDED else {}

        try:
            job = wait_for(f"end of job {job_id}", ended, timeout, 0.25)
        except ClusterError as error:
            now, output = self.job(job_id), self.job_output(job_id)
            self._ask("scancel", job_id)
            seen = f"{now['JobState']} ({now.get('Reason', '')})"
            raise ClusterError(f"{error}: {seen}; its output:\n{output}") from None
        code, _, number = job["ExitCode"].partition(":")
        return JobEnd(job["JobState"], int(code) or (128 + int(number) if int(number) else 0))

    def start_requeued(self, job_id: str) -> bool:
        """Lets a requeued job start now, as root may, and not after cred_expire. Whether there was one."""
        job = self.job(job_id)
        waits = (job["JobState"], job.get("Reason")) == ("PENDING", "BeginTime")
        if waits:
            # What was revoked with the last attempt are all credentials up to that second.
            time.sleep(1.5)
            self._ask("scontrol", "update", f"jobid={job_id}", "StartTime=now")
        return waits

    def job_output(self, job_id: str) -> str:
        """What a batch job wrote so far: standard output, then standard error if that has its own file."""
        job = self.job(job_id)
        paths = dict.fromkeys(Path(job[key]) for key in ("StdOut", "StdErr") if key in job)
        return "".join(path.read_text(errors="replace") for path in paths if path.is_file())

    def cancel_all(self) -> None:
        """End every job and wait until all of them have left their nodes."""

        def left() -> str:
            return self._ask("squeue", "--noheader", "--format=%i").strip()

        if left():
            self._ask("scancel", "--user=root")
            wait_for("end of the cancelled jobs", lambda: not left(), 60, 0.25)

    def _ask(self, *argv: str) -> str:
        done = self.run(argv, timeout=60)
        if done.returncode:
            raise ClusterError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
        return done.stdout


def _end(process: subprocess.Popen[str], patience_s: float) -> tuple[str, str]:
    """End nsenter and the command below it, and return what the command wrote."""
    # An srun that is asked to end takes its job along; a killed one leaves it behind.
    # nsenter passes no signal on, so the command itself is asked.
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGTERM)
    try:
        return process.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()
