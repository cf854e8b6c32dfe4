"""The job in which this process runs: its end, why it is ended, and how another job resumes its run."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.process_status import process_start_s

Say = Callable[[str], None]
"""Prints a line to the job's log."""

StopCause = Literal["walltime", "cancelled", "requeued", "preempted", "unknown"]
"""Why the scheduler ends a job with SIGTERM. `requeued`: the scheduler runs the same job again."""


@dataclass(frozen=True, kw_only=True)
class Successor:
    """The request for another job that resumes the run of this job.

    `until_s` is a time of `time.monotonic`, after which the scheduler is no longer asked. `on_unreachable` is
    called once with an error message if the scheduler cannot be reached at first. `leave_out` are nodes that
    the job should not get.
    """

    script: Path
    attempt: int
    until_s: float
    say: Say
    on_unreachable: Callable[[str], None]
    leave_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Queued:
    """The job that resumes the run, and the command that has queued it."""

    job_id: str
    argv: Sequence[str]


class RunningJob:
    """The job of this process. The defaults are those of a scheduler that does not resume runs by itself."""

    forwards_term = ""
    """A command that sends a signal to the ranks, such as `scancel --signal={signal} 17`; empty if signals
    are sent to the launcher, which forwards SIGTERM to its ranks."""

    sets_long_tmpdir = False
    """Whether the scheduler sets a TMPDIR that can be too long for sockets."""
    watched_ports: tuple[int, ...] = ()
    """The ports to which the supervisor connects on each node, the later ones if a firewall blocks the first
    one, `discard`, on which nothing listens: a node that refuses a connection is up. slurmd logs two errors
    for each connection without a message.
    """
    work_dir_variable = ""
    """The variable with the directory in which the job was submitted."""

    def __init__(self, job_id: str, environ: Mapping[str, str]) -> None:
        self.job_id = job_id
        self.environ = environ
        self.arguments: tuple[str, ...] = ()
        """The arguments of the job script, which another job of the run must get too."""
        self.script = ""
        """The text of the job script."""

    @property
    def work_dir(self) -> Path:
        """The directory in which the job was submitted, and in which its successor must be submitted."""
        return Path(self.environ.get(self.work_dir_variable) or Path.cwd())

    @property
    def is_job(self) -> bool:
        """Whether this process runs in a job of a scheduler; otherwise `job_id` is the process ID."""
        return self.job_id != str(os.getpid())

    def stop_cause(self, limit_s: float) -> StopCause:
        """Asks the scheduler, for at most `limit_s`, why this job has received SIGTERM."""
        return "unknown"

    def node_names(self) -> str:
        """Returns Slurm's compressed list of the nodes of this job; empty if they cannot be replaced."""
        return ""

    def scheduler_answers(self) -> bool:
        """Asks the scheduler about this job, for a few seconds, and returns whether it has answered."""
        return False

    def on_nodes(
        self, argv: Sequence[str], names: Sequence[str], num_nodes: int, directory: Path
    ) -> tuple[list[str], dict[str, str]]:
        """Returns the launch line for these nodes of the job, and variables that it needs.

        The numbers in `argv` are those for `num_nodes` nodes. Files for all nodes are written to `directory`.

        Raises:
            RequestError: this launcher cannot leave nodes of a job out, or the line lacks a number.
            DdpHpcError: a file cannot be written.
        """
        return list(argv), {}

    def unhealthy_nodes(self, names: Sequence[str]) -> dict[str, str]:
        """Returns the nodes of which the site's health check has reported a failure, with its message."""
        return {}

    def run_beside_ranks(self, name: str, argv: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """Starts `argv` on this node of the job; returns the process that waits for its end, or None if it is
        not needed.
        """
        return None

    def end_ranks(self, limit_s: float) -> bool | None:
        """Ends the ranks that a killed launcher has left on any node.

        Returns whether they have ended; None if the scheduler does not know ranks.
        """
        return None

    def variables_for_successor(self) -> dict[str, str]:
        """Returns variables that the user passed to this job, and that a successor gets only from its script.

        Raises:
            RequestError: a variable cannot be passed on.
        """
        return {}

    def submit_options(self) -> list[str]:
        """Returns the options of the submit command with which another job gets what this job requested."""
        return []

    def resubmit(self, request: Successor) -> Queued:
        """Requeues this job, or submits a job that starts after this one.

        Raises:
            DdpHpcError: the scheduler did not accept the request.
        """
        raise DdpHpcError("ddp-hpc cannot requeue jobs of this scheduler; submit the script again")


def with_count(argv: Sequence[str], option: str, num_nodes: int, num_used: int) -> list[str]:
    """Returns the launch line in which the number after `option`, such as `--ntasks=8` or `-n 8`, is changed
    from that of `num_nodes` nodes to that of `num_used`.

    Raises:
        RequestError: the line has no such number.
    """
    words = list(argv)
    for index, word in enumerate(words[:-1]):
        name, is_one_word, number = word.partition("=")
        if name == option:
            at, start = (index, f"{name}=") if is_one_word else (index + 1, "")
            number = number or words[at]
            if number.isdecimal():
                words[at] = f"{start}{int(number) * num_used // num_nodes}"
                return words
            break
    raise RequestError(
        f"--spare-nodes or --min-nodes was given, but the launch line lacks {option} and a number, which "
        "depends on the nodes that are left; add them"
    )


def started_s() -> float:
    """Returns the start of this process in seconds since the Unix epoch.

    A job script replaces itself with the supervisor (`exec`), so this is the start of the script. Ranks and
    interactive shells start later than their job.
    """
    start_s = process_start_s(os.getpid())
    return time.time() if start_s is None else start_s


# Variables that describe a job or a rank. A job that inherits these variables would be mistaken for a part of
# the old job.
_OF_A_RANK = ("RANK", "WORLD_SIZE")
_OF_A_RANK_ENDINGS = ("_RANK", "_VISIBLE_DEVICES")


def without_job(environ: Mapping[str, str], prefixes: tuple[str, ...], keep: str = "") -> dict[str, str]:
    """Returns the environment for a new job: without variables of the old job and of its ranks."""
    return {
        name: value
        for name, value in environ.items()
        if name == keep
        or not (
            name.startswith(("PMI", "PALS_", "OMPI_", "MASTER_", *prefixes))
            or name in _OF_A_RANK
            or name.endswith(_OF_A_RANK_ENDINGS)
        )
    }
