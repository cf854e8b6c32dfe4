"""A user's actions on the head node of the test cluster: run commands, submit jobs, wait for them."""

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

from tests.waiting import PATIENCE

from . import nodes
from .configuration import HEAD, Layout
from .nodes import ClusterError, wait_for

_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
}


@dataclass(frozen=True)
class JobEnd:
    """The end of a job: Slurm's state, and the exit code as in a shell (128 + number for a signal)."""

    state: str
    exit_code: int


class HeadNode:
    """The commands of a user who is logged in to the head node of a running cluster."""

    _layout: Layout | None = None

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            raise ClusterError("the cluster is not up")
        return self._layout

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Returns the environment of a new login with this Python's environment active, and `extra`.

        The caller's environment is not used: its SLURM_* and PMI_* would be mistaken for the cluster's.
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
        """Returns the command line that runs `argv` on a node; start it with `environment()`."""
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
        """Runs a command on the head node or on another node; returns its exit code and its output as text.

        `env` is added to `environment()`; `cwd` is the home directory by default.

        Raises:
            subprocess.TimeoutExpired: the command was ended after `timeout` seconds.
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
                out, err = process.communicate(stdin, timeout=PATIENCE * timeout)
            except subprocess.TimeoutExpired:
                out, err = _end(process, patience_s=self.layout.settings.kill_wait_s + 5)
                raise subprocess.TimeoutExpired(words, PATIENCE * timeout, out, err) from None
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
        """Submits a script, given as a path or as its text, and returns the job ID.

        Raises:
            ClusterError: sbatch rejects the script; with its message.
        """
        file, text = ([script], "") if isinstance(script, Path) else ([], script)
        done = self.run(["sbatch", "--parsable", *args, *file], env=env, cwd=cwd, stdin=text, timeout=60)
        if done.returncode:
            raise ClusterError(f"sbatch: {done.stderr.strip()}")
        return done.stdout.strip().partition(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """Returns the controller's data on a job, by the names of scontrol.

        Raises:
            ClusterError: the job is unknown, or is an array, whose jobs must be given as ID_INDEX.
        """
        text = self._ask("scontrol", "--oneliner", "show", "job", job_id).strip()
        if "\n" in text:
            raise ClusterError(f"job {job_id} is an array; ask for one element, such as {job_id}_0")
        return dict(re.findall(r"(\S+?)=(.*?)(?= \S+=| *$)", text))

    def wait(self, job_id: str, timeout: float = 120.0, *, requeues_at_once: bool = False) -> JobEnd:
        """Waits for the end of a job. `sbatch --wait` would notice the end up to 32 s later.

        With `requeues_at_once`, a requeued job is started again immediately.

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
        """Starts a requeued job now instead of after cred_expire; returns whether there was one.

        Needs root.
        """
        job = self.job(job_id)
        waits = (job["JobState"], job.get("Reason")) == ("PENDING", "BeginTime")
        if waits:
            # The end of the last attempt revoked all credentials that were created up to that second.
            time.sleep(1.5)
            self._ask("scontrol", "update", f"jobid={job_id}", "StartTime=now")
        return waits

    def job_output(self, job_id: str) -> str:
        """Returns the output of a batch job so far: stdout, then stderr if it is in a separate file."""
        job = self.job(job_id)
        paths = dict.fromkeys(Path(job[key]) for key in ("StdOut", "StdErr") if key in job)
        return "".join(path.read_text(errors="replace") for path in paths if path.is_file())

    def cancel_all(self) -> None:
        """Cancels every job and waits until no node has a job."""

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
    """Ends nsenter and the command that it runs, and returns the command's output."""
    # After SIGTERM, srun ends its job step; after SIGKILL it cannot. nsenter forwards no
    # signals, so the command itself is signalled.
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGTERM)
    try:
        return process.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()
