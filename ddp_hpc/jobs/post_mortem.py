"""Why a job ended without success, and what to do about it."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from ddp_hpc.errors import EXIT_REQUEUE
from ddp_hpc.jobs.first_failure import Failure, first_failure, last_lines, this_attempt
from ddp_hpc.run_directory import RunState
from ddp_hpc.schedulers.job_state import JobState
from ddp_hpc.schedulers.registry import SCHEDULERS
from ddp_hpc.units import format_walltime

# What a log says and the scheduler's word for the end does not: srun and the batch script end with a plain
# exit code where the kernel killed one task. Seen with Slurm 22.05 and OpenPBS 23.06.
_IN_LOG = (
    ("walltime", re.compile(r"DUE TO TIME LIMIT|=>> PBS: job killed: walltime")),
    # mem and vmem: OpenPBS's resmom/linux/mom_mach.c.
    ("memory", re.compile(r"oom-kill event|: Out Of Memory$|=>> PBS: job killed: v?mem", re.MULTILINE)),
    ("node", re.compile(r"Node failure on |DUE TO NODE FAILURE")),
    ("preempted", re.compile(r"DUE TO PREEMPTION")),
    # PyTorch's allocators; the name of the exception is torch.OutOfMemoryError from 2.5 on.
    ("gpu memory", re.compile(r"(?:CUDA|HIP|XPU) out of memory|OutOfMemoryError: ")),
    ("memory", re.compile(r"DefaultCPUAllocator: can't allocate memory|^MemoryError\b", re.MULTILINE)),
    ("disk", re.compile(r"No space left on device|Disk quota exceeded")),
)
_ENDED_FROM_OUTSIDE = ("walltime", "cancelled", "preempted")
_LAUNCHER_ENDED = re.compile(r"stopped at step [0-9]+: the launcher ended with")
_ERROR = re.compile(r"^\[[^]]*\] error: ")
# Slurm's reason for any job that ends with another exit code than 0.
_NO_REASON = "NonZeroExitCode"
_SHELL = {126: "the shell may not run the command", 127: "the shell did not find the command"}

_REMEDIES = {
    "walltime": "ask for a longer --walltime, or save snapshots so that the next job goes on",
    "memory": (
        "ask for more memory a node, or take a smaller --batch-size and fewer --workers; ddp-hpc estimate "
        "tells what a model needs"
    ),
    "gpu memory": (
        "take a smaller --batch-size with --accumulate, or --amp bf16; ddp-hpc estimate tells what fits"
    ),
    "disk": "make room or name another place for snapshots and data, then submit it again",
    "node": "submit it again; if the same node is lost again, leave it out and tell the site",
    "preempted": "submit it again, or to a queue that is not preempted",
    "cancelled": "nothing, if that was you; else submit it again",
    "not started": (
        "see that the folder of its log is there and can be written, and that the script's interpreter is "
        "there; then submit it again"
    ),
    "dropped": "submit it again, without the dependency or after a job that ddp-hpc status knows",
    "failed": "mend what the lines say, then submit it again",
    "again": "submit the script again",
}

# Reasons of squeue.1 and comments of PBS's scheduler with which a job would wait for ever.
_NEVER = re.compile(
    r"PartitionTimeLimit|PartitionNodeLimit|BadConstraints|DependencyNeverSatisfied|InvalidAccount|InvalidQOS|"
    r"AccountNotAllowed|QOSNotAllowed|AssocMaxWallDurationPerJobLimit|QOSMaxWallDurationPerJobLimit|"
    r"Can Never Run"
)
_USERS_HOLD = "held by its user"
_HELD = re.compile(r"too many failed attempts|launch failed requeued held|JobHoldMaxRequeue")


@dataclass(frozen=True, kw_only=True)
class PostMortem:
    """`cause` in a word or two, `what` the scheduler's and the run's own reasons, `remedy` what to do.

    `rank` and `host` are those that failed first, where anybody tells; `lines` are the log's words for it.
    """

    cause: str
    what: str
    rank: int | None
    host: str
    lines: tuple[str, ...]
    remedy: str


def examine(job: JobState, state: RunState | None, log: str, next_job: str) -> PostMortem | None:
    """Why the job ended; None where it has not, or ended well. `state`: the run's, if it is this job's."""
    if job.phase != "ended" or job.end == "done":
        return None
    own = this_attempt(log)
    cause = _cause(job, own)
    # Ranks that somebody ended have not failed.
    failure = first_failure(own) if cause not in _ENDED_FROM_OUTSIDE else None
    lost = cause == "again" and _was_lost(own, failure, state)
    reasons = (
        _how(job, cause, lost=lost),
        job.reason.removeprefix(_NO_REASON),
        state.reason if state else "",
    )
    what = "; ".join(dict.fromkeys(reason for reason in reasons if reason))
    lines = failure.lines if failure else last_lines(own)
    return PostMortem(
        cause=cause,
        what=what,
        rank=failure.rank if failure else None,
        host=failure.host if failure else "",
        lines=lines,
        remedy=_remedy(cause, job, state, failure, next_job),
    )


def advice_while_waiting(job: JobState) -> str:
    """What to do about a job that waits for what will not come; empty for one that just waits its turn."""
    if _HELD.search(job.reason):
        return f"it was started and could not run; cancel it; {_REMEDIES['not started']}"
    if _USERS_HOLD in job.reason:
        return f"qrls {job.job_id} lets it go"
    if _NEVER.search(job.reason):
        return "it would wait for ever; cancel it, and mend the request: ddp-hpc lint tells more"
    return ""


def _cause(job: JobState, log: str) -> str:
    if job.exit_code == EXIT_REQUEUE:
        return "again"
    if job.end != "failed":
        return job.end
    return next((cause for cause, pattern in _IN_LOG if pattern.search(log)), "failed")


def _was_lost(log: str, failure: Failure | None, state: RunState | None) -> bool:
    """Whether the job goes on since ranks were lost, and not by its own will."""
    told = failure is not None and any(_ERROR.search(line) for line in failure.lines)
    return told or _LAUNCHER_ENDED.search(log) is not None or (state is not None and state.state == "running")


def _how(job: JobState, cause: str, *, lost: bool = False) -> str:
    if cause == "walltime":
        limit = f" of {format_walltime(job.walltime_s)}" if job.walltime_s else ""
        return f"it reached its walltime{limit}"
    if lost:
        return "it lost a rank or a node, and goes on from what it had saved"
    if cause == "again":
        return "it stopped on purpose with its state saved"
    texts = {
        "memory": "it used more memory than it had",
        "gpu memory": "a GPU's memory was too small",
        "disk": "a disk or a quota is full",
        "node": "a node was lost",
        "preempted": "it made room for another job",
        "cancelled": "it was cancelled",
        "not started": "it could not be started",
        "dropped": "PBS has dropped it without a word, and it never ran",
    }
    return ", ".join(filter(None, (texts.get(cause, ""), _code(job))))


def _code(job: JobState) -> str:
    if job.signal:
        try:
            return f"killed by {signal.Signals(job.signal).name}"
        except ValueError:
            return ""  # Slurm's 0:125 for memory is none
    if not job.exit_code:
        return ""
    number = job.exit_code - 128
    by_signal = signal.Signals(number).name if number in list(signal.Signals) else ""
    known = _SHELL.get(job.exit_code, by_signal)
    return f"exit code {job.exit_code}" + (f" ({known})" if known else "")


def _remedy(cause: str, job: JobState, state: RunState | None, failure: Failure | None, next_job: str) -> str:
    if next_job and cause != "failed":
        return f"nothing: the run goes on as job {next_job}"
    text = _REMEDIES[cause]
    if cause == "node" and failure and (command := SCHEDULERS[job.scheduler].exclude_host(failure.host)):
        text += f" ({command})"
    if state is not None and state.state != "done" and state.step:
        text += f"; it goes on after step {state.step}"
    return text
