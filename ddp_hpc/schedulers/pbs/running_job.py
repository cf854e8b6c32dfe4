"""The PBS job of this process: its walltime, why PBS ends it, and the submission of its successor."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.atomic_files import write_atomically
from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.job_variables import JOB_VARIABLES, node_file_hosts, read_node_file
from ddp_hpc.base.units import parse_walltime_s
from ddp_hpc.schedulers import run_command as commands
from ddp_hpc.schedulers.job_state import clock_s
from ddp_hpc.schedulers.pbs import carried_request as carried
from ddp_hpc.schedulers.pbs.query_and_cancel import TIME_FORMAT, attributes_in
from ddp_hpc.schedulers.running_job import (
    Queued,
    RunningJob,
    StopCause,
    Successor,
    with_count,
)

_ASK_LIMIT_S = 30.0
# Limit on one query that is repeated if it fails.
_ONE_QUERY_LIMIT_S = 5.0
# Whether PBS has dropped the successor is asked only if this much time is left.
_DROP_CHECK_S = 5.0
# The variables that qsub itself needs.
_KEPT = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "PWD", "LANG", "TZ", "PBS_CONF_FILE")
_INDICES = JOB_VARIABLES["pbs"].array_indices
_JOB_ID = re.compile(r"^[0-9]+(?:\.[A-Za-z0-9.-]+)?$", re.MULTILINE)
# JOB_SUBSTATE_RERUN of OpenPBS's job.h: qrerun, or a preemption after which PBS runs the job again.
_RERUN = "60"
# The state and substate of a job that the server has removed without running it (job_abt in req_register.c).
_DROPPED = ("F", "92")
_COMMAND_LINE = "Submit_arguments"
# Only the comment of a job that a user has deleted contains this text.
_DELETED = " and terminated"


class PbsJob(RunningJob):
    """The PBS job of this process."""

    watched_ports = (15002,)  # of pbs_mom, which logs nothing about a connection without a message
    sets_long_tmpdir = True
    work_dir_variable = "PBS_O_WORKDIR"

    def __init__(self, job_id: str, environ: Mapping[str, str]) -> None:
        super().__init__(job_id, environ)
        self._attributes = self._query(_ASK_LIMIT_S)

    def _query(self, limit_s: float, job_id: str = "") -> dict[str, str]:
        """Returns the attributes that `qstat -f` prints for this or another job; empty if qstat fails."""
        if not self.is_job:
            return {}
        try:
            return attributes_in(commands.run(("qstat", "-f", job_id or self.job_id), limit_s).out)
        except commands.NoAnswerError:
            return {}

    def stop_cause(self, limit_s: float) -> StopCause:
        now = self._query(limit_s)
        if _DELETED in now.get("comment", ""):
            return "cancelled"
        if now.get("substate") == _RERUN:
            return "requeued"
        # The walltime may have been changed with qalter.
        walltime_s, start_s = _walltime_s(now), clock_s(now.get("stime", ""), TIME_FORMAT)
        is_over = walltime_s is not None and start_s is not None and time.time() >= start_s + walltime_s
        return "walltime" if is_over else "unknown"

    def node_names(self) -> str:
        return ",".join(node_file_hosts(self.environ))

    def scheduler_answers(self) -> bool:
        return bool(self._query(_ONE_QUERY_LIMIT_S))

    def on_nodes(
        self, argv: Sequence[str], names: Sequence[str], num_nodes: int, directory: Path
    ) -> tuple[list[str], dict[str, str]]:
        if any(word.startswith("ppr:") for word in argv):  # only Open MPI maps its ranks like this
            raise RequestError(
                f"{argv[0]} is that of Open MPI, which starts ranks only on nodes in PBS's own node file, "
                "but --spare-nodes and --min-nodes need another file. Use the mpiexec of MPICH or PALS, or "
                "omit these options."
            )
        argv = with_count(argv, "-n", num_nodes, len(names))
        # PBS does not remove a lost node from its node file (start_exec.c). MPICH and PALS read another one
        # from the same variable, as does the rank discovery.
        lines_of = read_node_file(self.environ)
        node_file = directory / "nodes"
        lines = "".join(f"{name}\n" * lines_of[name] for name in names)
        write_atomically(node_file, lines.encode(), "job", is_private=True)
        return [argv[0], "--hostfile", str(node_file), *argv[1:]], {"PBS_NODEFILE": str(node_file)}

    def variables_for_successor(self) -> dict[str, str]:
        passed = self._variables()
        carried.check_names(passed)
        index = {name: self.environ[name] for name in _INDICES if self.environ.get(name)}
        return {**passed, **index}

    def submit_options(self) -> list[str]:
        known = self._known()
        if not known:
            account = self.environ.get("PBS_ACCOUNT")
            return [*(("-A", account) if account else ()), *self._queue()]
        options = carried.options(known, str(self.work_dir))
        environment = ["-V"] if carried.passes_environment(known, self.script) else []
        return [*options, *environment, *self._queue(), *carried.resources(known, self.script)]

    def resubmit(self, request: Successor) -> Queued:
        """Submits a job with the request of this job. It does not inherit the other variables of this job."""
        passed = self._variables()
        names = carried.safe_names(passed) if self._known() else carried.variables_in(self.script)
        variables = [*names, f"DDP_HPC_ATTEMPT={request.attempt}"]
        after = ["-W", f"depend=afterany:{self.job_id}"]
        if "[" in self.job_id:
            # qsub refuses a dependency on a subjob (parse_depend.c). The successor waits until it has ended.
            after = []
            variables.append(f"DDP_HPC_AFTER={self.job_id}")
        options, last = self.submit_options(), ["-v", ",".join(variables), str(request.script)]
        environ = self._environment(passed)
        successor = self._qsub([*options, *after, *last], environ, request)
        left_s = request.until_s - time.monotonic()
        if after and left_s > _DROP_CHECK_S and self._is_dropped(successor.job_id):
            request.say(
                f"ddp-hpc: PBS has dropped job {successor.job_id} because the server no longer knows job "
                f"{self.job_id}; submitting it again without the dependency"
            )
            successor = self._qsub([*options, *last], environ, request)
        return successor

    def _variables(self) -> dict[str, str]:
        """Returns the variables that `qsub -v` has passed to this job; -V passes them on by itself."""
        if carried.passes_environment(self._known(), self.script):
            return {}
        return carried.variables(self._known())

    def _is_dropped(self, job_id: str) -> bool:
        """Returns whether PBS has removed the job because it does not know the job on which it depends."""
        with suppress(commands.NoAnswerError):
            answer = commands.run(("qstat", "-xf", job_id), _DROP_CHECK_S)
            job = attributes_in(answer.out)
            return "Unknown Job Id" in answer.err or (job.get("job_state"), job.get("substate")) == _DROPPED
        return False

    def _known(self) -> dict[str, str]:
        """Returns the attributes of this job, for which the server is asked again if it has not answered."""
        if not self._attributes:
            self._attributes = self._query(_ASK_LIMIT_S)
        if self._attributes and "[" in self.job_id and _COMMAND_LINE not in self._attributes:
            # PBS does not copy the command line of qsub from the array (create_subjob in array_func.c).
            array = self._query(_ONE_QUERY_LIMIT_S, re.sub(r"\[.*\]", "[]", self.job_id))
            if array:
                self._attributes[_COMMAND_LINE] = array.get(_COMMAND_LINE, "")
        return self._attributes

    def _environment(self, passed: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of qsub, which passes on all of it with -V, and `passed` without."""
        environ = {name: self.environ[name] for name in _KEPT if self.environ.get(name)}
        if carried.passes_environment(self._known(), self.script):
            environ |= carried.variables(self._known())
        return {**environ, **passed, "PWD": str(self.work_dir)}

    def _qsub(self, arguments: list[str], environ: Mapping[str, str], request: Successor) -> Queued:
        """Submits a job. Retries only while the server is unreachable.

        After any other error a retry is unsafe, because the job may be queued although qsub failed.
        """
        answer = commands.submit_until(
            ("qsub", *arguments),
            request.until_s,
            request.on_unreachable,
            environ=environ,
            cwd=self.work_dir,
        )
        if answer.code:
            raise DdpHpcError(f"qsub failed: {answer.said}")
        job_ids = _JOB_ID.findall(answer.out)
        if not job_ids:
            raise DdpHpcError(f"qsub printed no job ID; check whether the job is queued: {answer.said}")
        return Queued(job_ids[-1], ("qsub", *arguments))

    def _queue(self) -> list[str]:
        # PBS_QUEUE may name a queue that accepts no direct submissions, because a routing queue feeds it.
        queue = self.environ.get("PBS_O_QUEUE")
        return ["-q", queue] if queue else []


def _walltime_s(attributes: Mapping[str, str]) -> float | None:
    text = attributes.get("Resource_List.walltime", "")
    try:
        return int(text) if text.isdecimal() else parse_walltime_s(text)
    except RequestError:
        return None
