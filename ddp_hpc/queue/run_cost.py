"""What a run has cost: the node-hours of its jobs, and for what they were used.

docs/reference/cost-of-a-run.md defines the categories. Each moment of a job belongs to one category, for the
nodes of its ranks; the other nodes of the job are idle. The sum is therefore the allocation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.timeline import Moment
from ddp_hpc.queue.run_timeline import Job, Launch, Line, Steps, has_succeeded, read_timeline

CATEGORIES = {
    "useful_steps": "useful steps",
    "start": "start",
    "restore": "restore",
    "repeated_steps": "steps repeated",
    "saves": "saves",
    "data": "waiting for data",
    "detection": "detection",
    "node_checks": "node checks",
    "restarts": "restarts",
    "idle_nodes": "idle nodes",
    "after_the_end": "after the end",
    "unknown": "unknown",
}
"""The keys of the categories in JSON, and their names in texts."""
_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Span:
    """What the nodes of the ranks did in a part of an attempt, from `from_s` until `until_s` (seconds since
    the Unix epoch). `parts_s` are the seconds in it that belong to other categories.
    """

    category: str
    from_s: float
    until_s: float
    parts_s: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class AttemptCost:
    """The node-hours of one attempt by category; see `CATEGORIES`.

    The first attempt of a job includes the time before it, and the last one that after it. `num_nodes` is the
    number of nodes of the job. `reason` is why the attempt ended; empty as long as this is not known.
    """

    attempt: int
    job_id: str
    num_nodes: int
    wall_s: float
    reason: str
    node_hours: dict[str, float]
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """The node-hours of all jobs of a run, by category and in total.

    `useful_share` is the share of the useful ones; None before the first job. `restarts` are the reasons why
    ranks were started again in the same job, oldest first. `not_restarted` is why the last job did not do so
    after its last failure; empty if it did, or did not fail.
    """

    total_node_hours: float
    useful_share: float | None
    node_hours: dict[str, float]
    restarts: tuple[str, ...]
    not_restarted: str
    attempts: tuple[AttemptCost, ...]


def run_cost(run_dir: Path, *, is_running: bool) -> RunCost | None:
    """Returns what the run has cost until now; None if the run has recorded no times.

    `is_running` is whether its last job is running, as far as is known.
    """
    jobs = read_timeline(run_dir)
    if not jobs:
        return None
    if is_running and jobs[-1].ended_s is None:
        jobs[-1].last_s = max(jobs[-1].last_s, time.time())
    attempts = tuple(cost for job in jobs for cost in _of_job(job, is_current=is_running and job is jobs[-1]))
    totals = {name: sum(cost.node_hours[name] for cost in attempts) for name in CATEGORIES}
    total = sum(totals.values())
    return RunCost(
        total_node_hours=total,
        useful_share=totals["useful_steps"] / total if total else None,
        node_hours=totals,
        restarts=tuple(reason for job in jobs for reason in _restarts(job)),
        not_restarted=jobs[-1].not_restarted,
        attempts=attempts,
    )


def _restarts(job: Job) -> Iterator[str]:
    for launch in job.launches:
        # torchrun can start the ranks again in the same attempt.
        yield from (_reason(steps.end) or "unknown" for steps in launch.steps[:-1])
        if launch is not job.launches[-1]:
            yield _reason(launch.end) or "unknown"


def _reason(end: Line | None) -> str:
    return "" if end is None else end["reason"] or end["cause"]


def _of_job(job: Job, *, is_current: bool) -> Iterator[AttemptCost]:
    end_s = job.last_s if job.ended_s is None else job.ended_s
    spending = _Spending(job.began_s, end_s)
    # Without a launch, the launcher could not be started.
    launches = job.launches or [Launch(job.key, end_s, job.num_nodes, last_s=end_s)]
    for launch, later in zip(launches, [*launches[1:], None], strict=True):
        from_s = spending.now_s
        following_s = end_s if later is None else later.began_s
        is_open = is_current and later is None and launch.ended_s is None and launch.end is None
        begin = "start" if launch is launches[0] else "restarts"
        _spend(launch, spending, begin, following_s, is_open=is_open)
        if later is None:
            spending.until(end_s, "after_the_end")
        yield _attempt_cost(launch, job.num_nodes, spending.now_s - from_s, spending.take())


def _attempt_cost(launch: Launch, num_nodes: int, wall_s: float, spans: tuple[Span, ...]) -> AttemptCost:
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for span in spans:
        seconds[span.category] += span.until_s - span.from_s - sum(span.parts_s.values())
        for name, part_s in span.parts_s.items():
            seconds[name] += part_s
    node_hours = {name: used_s * launch.num_used / _HOUR_S for name, used_s in seconds.items()}
    node_hours["idle_nodes"] = wall_s * (num_nodes - launch.num_used) / _HOUR_S
    number, _, job_id = launch.key.partition(" ")
    return AttemptCost(
        attempt=int(number) if number.isdecimal() else 0,
        job_id=job_id,
        num_nodes=num_nodes,
        wall_s=wall_s,
        reason=_reason(launch.end),
        node_hours=node_hours,
        spans=spans,
    )


class _Spending:
    """Divides the time of a job among categories, from `now_s` until `limit_s`."""

    def __init__(self, now_s: float, limit_s: float) -> None:
        self.now_s, self._limit_s = now_s, max(now_s, limit_s)
        self._spans: list[Span] = []

    def until(self, at_s: float, category: str, **parts_s: float) -> None:
        """Spends the time until `at_s` on a category, except for `parts_s`, the seconds of other ones.

        The clocks of nodes can differ, so that `at_s` can be in the past.
        """
        at_s = min(max(at_s, self.now_s), self._limit_s)
        left_s, spent_s = at_s - self.now_s, {}
        for name, part_s in parts_s.items():
            spent_s[name] = min(max(part_s, 0.0), left_s)
            left_s -= spent_s[name]
        if at_s > self.now_s:
            self._spans.append(Span(category=category, from_s=self.now_s, until_s=at_s, parts_s=spent_s))
        self.now_s = at_s

    def take(self) -> tuple[Span, ...]:
        """Returns what the time since the last call was spent on."""
        spans, self._spans = tuple(self._spans), []
        return spans


def _spend(launch: Launch, spending: _Spending, begin: str, following_s: float, *, is_open: bool) -> None:
    """Spends the time until the launcher has ended. `begin` is the category of the time before the steps."""
    ended_s = following_s if launch.ended_s is None else launch.ended_s
    is_known = launch.ended_s is not None or launch.end is not None or is_open
    alive_s = _alive_s(launch.end, ended_s if is_known else launch.last_s)
    checks_s, rest = launch.checks_s, "detection" if is_known else "unknown"
    all_steps = launch.all_steps()
    for steps in all_steps[:-1]:  # torchrun has started the ranks again
        spending.until(steps.began_s, begin, node_checks=checks_s, restore=steps.restore_s)
        last_s = steps.saved[-1]["at_s"] if steps.saved else steps.began_s
        _spend_steps(steps, spending, _alive_s(steps.end, math.inf if steps.end else last_s))
        spending.until(steps.end["at_s"] if steps.end else last_s, "detection")
        begin, checks_s = "restarts", 0.0
    if all_steps:
        steps = all_steps[-1]
        spending.until(steps.began_s, begin, node_checks=checks_s, restore=steps.restore_s)
        if _spend_steps(steps, spending, alive_s, is_open=is_open):
            rest = "after_the_end"
    else:
        spending.until(alive_s, begin, node_checks=checks_s)
    spending.until(ended_s, rest)


def _spend_steps(steps: Steps, spending: _Spending, alive_s: float, *, is_open: bool = False) -> bool:
    """Spends the time of steps until the last sign of life; returns whether all of them were kept."""
    kept = steps.kept
    kept_s = steps.began_s if kept is None else kept["at_s"]
    if kept is not None and kept["moment"] == Moment.STEPS_ENDED:
        alive_s, is_kept = kept_s, True
    else:
        has_lost = bool(steps.saved) and kept is not steps.saved[-1]
        is_kept = is_open or (has_succeeded(steps.end) and not has_lost)
    waits = {} if kept is None else {"saves": kept["save_s"], "data": kept["data_s"]}
    # A snapshot is a sign of life, too: the supervisor asks a node only every few seconds whether it answers.
    spending.until(alive_s if is_kept else kept_s, "useful_steps", **waits)
    spending.until(alive_s, "repeated_steps")
    return is_kept


def _alive_s(end: Line | None, otherwise_s: float) -> float:
    """Returns the time of the last sign of life of the ranks, at most `otherwise_s`."""
    return otherwise_s if end is None else min(otherwise_s, end["at_s"] - end["silent_s"])
