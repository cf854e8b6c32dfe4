"""Determines why a job ended without success, and what to do about it."""

from __future__ import annotations

import re
import shlex
import signal
from dataclasses import dataclass
from typing import NamedTuple

from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.errors import EXIT_REQUEUE
from ddp_hpc.base.run_outcomes import Cause, State
from ddp_hpc.base.run_state import RunState
from ddp_hpc.base.units import format_walltime
from ddp_hpc.queue.causes_in_log import cause_in, lost_node_in
from ddp_hpc.queue.first_failure import Failure, first_failure, last_attempt, last_lines
from ddp_hpc.schedulers.job_state import JobState
from ddp_hpc.schedulers.registry import SCHEDULERS

_TERMINATED = ("walltime", "cancelled", "preempted", "deadline")
# Recorded causes that are no reason for the failure of a job, or say no more than that it has failed.
_NO_FAILURES = State.ending_in("success", "stop")
_ORDINARY = (
    *(cause for cause in Cause if cause.state_of_run(has_progressed=False) in _NO_FAILURES),
    Cause.FAILED,
    Cause.EXITED,
)
# Slurm gives this reason for every job with a non-zero exit code.
_NO_REASON = "NonZeroExitCode"
_STOPS, _ON_PURPOSE = State.ending_in("stop"), "it saved its state and stopped on purpose"
_SHELL = {126: "the command is not executable", 127: "command not found"}


class _Text(NamedTuple):
    """What `status` says about a cause: how the job ended, and what to do."""

    how: str
    remedy: str


_TEXTS: dict[str, _Text] = {
    "walltime": _Text(
        "it reached its walltime", "increase --walltime, or save snapshots so that the next job can resume"
    ),
    "memory": _Text(
        "it used more memory than it had requested",
        "request more memory per node, or reduce --batch-size and --workers; ddp-hpc estimate shows how "
        "much memory a model needs",
    ),
    "gpu memory": _Text(
        "a GPU ran out of memory",
        "reduce --batch-size and use --accumulate, or use --amp bf16; ddp-hpc estimate shows what fits",
    ),
    "disk": _Text(
        "a disk or a quota is full",
        "free disk space, or use another file system for snapshots and data, then submit it again",
    ),
    "variables": _Text(
        "",
        "the program needs the variables of torchrun, such as RANK: start it with `ddp-hpc exec -- python "
        "...`, as render and submit do unless --env-style none is given, or use --launcher torchrun",
    ),
    "ssh": _Text(
        "mpiexec could not start ranks on another node with ssh",
        "use an mpiexec that starts the ranks through the scheduler",
    ),
    "node": _Text(
        "a node was lost",
        "submit it again; if the same node fails again, exclude it and report it to the site",
    ),
    "preempted": _Text(
        "it was preempted by another job", "submit it again, or submit it to a queue without preemption"
    ),
    "cancelled": _Text("it was cancelled", "none if you cancelled it; otherwise submit it again"),
    "not started": _Text(
        "it could not be started",
        "check that the directory of its log exists and is writable, and that the script's interpreter "
        "exists; then submit it again",
    ),
    "deadline": _Text("its --deadline has passed", "submit it again with a later --deadline or without one"),
    "dropped": _Text(
        "PBS dropped it without a message, and it never ran",
        "submit it again without the dependency, or with one on a job that ddp-hpc status knows",
    ),
    "unknown": _Text(
        "PBS has no record of how it ended, or whether it ran",
        "check its log and its results; if it has not completed its work, submit it again",
    ),
    **{state: _Text(_ON_PURPOSE, state.how_to_resume()) for state in _STOPS},
}

# Reasons from squeue(1) and comments of PBS's scheduler for jobs that can never start.
_NEVER = re.compile(
    r"PartitionTimeLimit|PartitionNodeLimit|BadConstraints|DependencyNeverSatisfied|InvalidAccount|InvalidQOS|"
    r"AccountNotAllowed|QOSNotAllowed|AssocMaxWallDurationPerJobLimit|QOSMaxWallDurationPerJobLimit|"
    r"Can Never Run"
)
_USER_HOLD = "held by its user"
_HELD = re.compile(r"too many failed attempts|launch failed requeued held|JobHoldMaxRequeue")


@dataclass(frozen=True, kw_only=True)
class PostMortem:
    """The reason for the end of a job.

    `cause` is a short category, `what` combines the reasons from the scheduler and the run, and `remedy` is
    what to do. `rank` and `host` say where the first failure occurred, if this is known. `lines` are the
    lines of the log about this failure.
    """

    cause: str
    what: str
    rank: int | None
    host: str
    lines: tuple[str, ...]
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known about the end of a job, besides its state in the scheduler.

    `state` is the content of the state file; None if another job has written it. `next_job` resumes the run;
    empty without one. `first_step` is the step after which the job resumed the run, and `recorded` how its
    attempt ended, if it is known. `has_command` is whether the job has left the command that resumes the run.
    """

    log: str = ""
    state: RunState | None = None
    next_job: str = ""
    first_step: int = 0
    recorded: AttemptEnd | None = None
    has_command: bool = False


def examine(job: JobState, evidence: Evidence) -> PostMortem | None:
    """Returns the reason why a job failed; None if it succeeded or has not ended."""
    if job.phase != "ended" or job.end == "done":
        return None
    log, state, recorded = last_attempt(evidence.log), evidence.state, evidence.recorded
    cause = _cause(job, log, state, recorded)
    # If the scheduler has ended the job, the ranks that end with a signal are not the cause.
    failed = recorded if recorded is not None and recorded.cause.is_failure else None
    failure = first_failure(log, failed) if cause not in _TERMINATED else None
    host = (failure.host if failure else "") or (lost_node_in(log) if cause == "node" else "")
    # A lost rank or node leaves the state `running`, whose reason only says since when.
    is_running = state is not None and state.state is State.RUNNING
    lost_ranks, of_run = failed is not None or is_running, failed if is_running else state
    reasons = (
        _how(job, cause, failure, lost_ranks=lost_ranks),
        job.reason.removeprefix(_NO_REASON),
        of_run.reason if of_run else "",
    )
    return PostMortem(
        cause=cause,
        what="; ".join(dict.fromkeys(reason for reason in reasons if reason)),
        rank=failure.rank if failure else None,
        host=host,
        lines=failure.lines if failure else last_lines(log),
        remedy=_remedy(cause, job, evidence, host),
    )


def advice_while_waiting(job: JobState) -> str:
    """Returns what to do about a job that cannot start; empty for a job that waits for resources."""
    if _HELD.search(job.reason):
        return f"the job was started but could not run; cancel it; {_TEXTS['not started'].remedy}"
    if _USER_HOLD in job.reason:
        # PBS holds and releases whole arrays only.
        held = re.sub(r"\[.+\]", "[]", job.job_id)
        return f"release the job with: qrls {shlex.quote(held)}"
    if _NEVER.search(job.reason):
        return "the job can never start; cancel it and correct the request: ddp-hpc lint shows details"
    return ""


def _cause(job: JobState, log: str, state: RunState | None, recorded: AttemptEnd | None) -> str:
    # A program without a checkpoint that exits with this code has failed.
    has_failed = state is not None and state.state.is_failure
    if job.exit_code == EXIT_REQUEUE and job.end != "cancelled" and not has_failed:
        return state.state if state is not None and state.state.is_stopped else State.REQUEUE
    if job.end != "failed":
        return job.end
    own = Cause.FAILED if recorded is None or recorded.cause in _ORDINARY else recorded.cause
    return own if not own.is_vague else cause_in(log) or own


def _how(job: JobState, cause: str, failure: Failure | None, *, lost_ranks: bool) -> str:
    text = _TEXTS[cause].how if cause in _TEXTS else ""
    if cause == "walltime" and job.walltime_s:
        return f"{text} of {format_walltime(job.walltime_s)}"
    if cause == "requeue" and lost_ranks:
        return "it lost a rank or a node after it had saved a snapshot"
    if cause in ("walltime", "deadline", *_STOPS):
        return text  # Slurm sets an exit code even if the job did not run before its deadline
    code, number = job.exit_code, job.signal
    if cause in tuple(Cause) and failure is not None and failure.exit_code is not None:
        # The exit code of the job can be that of a rank that was terminated because of this failure.
        code, number = failure.exit_code, None
    return ", ".join(filter(None, (text, _code(code, number))))


def _code(code: int | None, number: int | None) -> str:
    if number:
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return ""  # such as 125, with which Slurm reports that a job ran out of memory
    if not code:
        return ""
    by_signal = signal.Signals(code - 128).name if code - 128 in list(signal.Signals) else ""
    known = _SHELL.get(code, by_signal)
    return f"exit code {code}" + (f" ({known})" if known else "")


def _remedy(cause: str, job: JobState, evidence: Evidence, host: str) -> str:
    state = evidence.state or RunState(State.RUNNING, evidence.first_step, "")
    if evidence.next_job and cause != "failed" and state.state.is_resumed_by_job:
        return f"none: job {evidence.next_job} resumes the run"
    text = _TEXTS[cause].remedy if cause in _TEXTS else Cause(cause).advice or Cause.FAILED.advice
    commands = SCHEDULERS[job.scheduler].commands
    if cause in _STOPS and evidence.has_command:
        # The script itself can lack options and variables of the job, or be that of a whole array.
        text = State(cause).how_to_resume("resume the run with the command in `resume`")
    if cause == "ssh":
        text = commands.start_without_ssh or text
    if cause == "node" and host and (command := commands.exclude_host(host)):
        text += f" ({command})"
    text = state.state.advice_with(text)
    if not state.state.is_complete and state.step:
        text += f"; it resumes after step {state.step}"
    return text
