"""Reads the file `timeline` of a run: its jobs, the starts of their launchers, and the steps of each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.base.timeline import TIMELINE, Moment
from ddp_hpc.queue.submission_ledger import read_lines

Line = dict[str, Any]
# About 800 attempts of two days. Without a limit, a damaged file could fill the memory.
_MAX_BYTES = 64 * 1024 * 1024


@dataclass
class Steps:
    """Steps without an interruption: those of one start of the ranks. torchrun can start the ranks several
    times in one attempt.

    `saved` are the lines about complete snapshots, and about the end of the steps, and `done` those about
    their losses and times. `limit` is the step from which the run was resumed afterwards: snapshots of later
    steps were lost. `end` is the line about the end of the attempt; None without one.
    """

    began_s: float
    first_step: int = 0
    restore_s: float = 0.0
    saved: list[Line] = field(default_factory=list)
    done: list[Line] = field(default_factory=list)
    limit: float = math.inf
    end: Line | None = None

    @property
    def kept(self) -> Line | None:
        """The line about the last state that was not lost; None if there is none."""
        return next((line for line in reversed(self.saved) if line["step"] <= self.limit), None)


@dataclass
class Launch:
    """One start of the launcher, which is an attempt of the run, on `num_used` nodes. `ended_s` is None
    without a line about it, and `last_s` the time of its last line.
    """

    key: str
    began_s: float
    num_used: int
    records_steps: bool = True
    checks_s: float = 0.0
    last_s: float = 0.0
    program_s: float | None = None
    checkpoint_s: float | None = None
    ended_s: float | None = None
    steps: list[Steps] = field(default_factory=list)
    end: Line | None = None

    def all_steps(self) -> list[Steps]:
        """Returns the steps. Those of a program that does not record them last as long as the program."""
        began_s = self.program_s if self.program_s is not None or self.records_steps else self.began_s
        if self.steps or began_s is None:
            return self.steps
        saved = {"at_s": self.checkpoint_s, "moment": Moment.SAVED, "step": 0, "save_s": 0.0, "data_s": 0.0}
        return [Steps(began_s, saved=[saved] if self.checkpoint_s is not None else [], end=self.end)]


@dataclass
class Job:
    """One start of a job, of which `key` is the first attempt. `ended_s` is None without a line about it, and
    `last_s` the time of its last line. `not_restarted` is why its ranks were not started again.
    """

    key: str
    began_s: float
    num_nodes: int
    last_s: float
    ended_s: float | None = None
    not_restarted: str = ""
    launches: list[Launch] = field(default_factory=list)


def read_timeline(run_dir: Path) -> list[Job]:
    """Returns the jobs of the run, oldest first; none without the file. Damaged lines are skipped."""
    jobs: list[Job] = []
    before: Steps | None = None
    for line in _lines(run_dir):
        at_s, key, moment = line["at_s"], line["attempt"], line["moment"]
        if moment == Moment.JOB_BEGAN:
            jobs.append(Job(key, at_s, max(1, line["num_nodes"]), at_s))
        if not jobs:
            continue
        job = jobs[-1]
        job.last_s = max(job.last_s, at_s)
        if moment == Moment.LAUNCHER_STARTED:
            num_used = min(line["num_used"] or job.num_nodes, job.num_nodes)
            job.launches.append(Launch(key, at_s, num_used, line["records_steps"], line["checks_s"], at_s))
        elif moment == Moment.NOT_RESTARTED:
            job.not_restarted = line["reason"]
        elif moment == Moment.JOB_ENDED:
            job.ended_s = at_s
        # Ranks of an earlier attempt that have not ended yet can write lines, too.
        elif job.launches and job.launches[-1].key == key:
            launch = job.launches[-1]
            launch.last_s = max(launch.last_s, at_s)
            if moment == Moment.STEPS_BEGAN:
                launch.steps.append(Steps(at_s, line["step"], line["restore_s"]))
                if before is not None:
                    before.limit = line["step"]
                before = launch.steps[-1]
            else:
                _add(line, launch)
    return jobs


def _add(line: Line, launch: Launch) -> None:
    match line["moment"]:
        case Moment.PROGRAM_BEGAN:
            launch.program_s = line["at_s"]
        case Moment.SAVED | Moment.STEPS_ENDED if launch.steps:
            launch.steps[-1].saved.append(line)
        case Moment.STEPS if launch.steps:
            launch.steps[-1].done.append(line)
        case Moment.ATTEMPT_ENDED:
            launch.end = line
            if launch.steps:
                launch.steps[-1].end = line
        case Moment.LAUNCHER_ENDED:
            launch.ended_s, launch.checkpoint_s = line["at_s"], line["checkpoint_s"]


def has_succeeded(end: Line | None) -> bool:
    """Returns whether the attempt has completed the run, or has stopped with its state saved."""
    if end is None or end["cause"] not in list(Cause):
        return False
    state = Cause(end["cause"]).state_of_run(has_progressed=False)
    return state is not None and not state.is_failure


_NEEDED: dict[str, tuple[str, ...]] = {
    Moment.JOB_BEGAN: ("num_nodes",),
    Moment.LAUNCHER_STARTED: ("num_used", "records_steps", "checks_s"),
    Moment.STEPS_BEGAN: ("step", "restore_s"),
    Moment.STEPS: ("step", "loss", "num_steps", "steps_s", "data_s"),
    Moment.SAVED: ("step", "save_s", "data_s"),
    Moment.STEPS_ENDED: ("step", "save_s", "data_s"),
    Moment.ATTEMPT_ENDED: ("silent_s", "cause", "reason"),
    Moment.LAUNCHER_ENDED: ("checkpoint_s",),
    Moment.NOT_RESTARTED: ("reason",),
}
_TEXTS, _OPTIONAL = ("cause", "reason"), ("num_used", "checkpoint_s", "loss")


def _lines(run_dir: Path) -> Iterator[Line]:
    for text in read_lines(run_dir / TIMELINE, _MAX_BYTES):
        try:
            line = json.loads(text)
            names = ("at_s", *_NEEDED.get(line["moment"], ()))
            if isinstance(line["attempt"], str) and all(_is_valid(name, line[name]) for name in names):
                yield line
        except (ValueError, KeyError, TypeError, RecursionError):
            continue


def _is_valid(name: str, value: object) -> bool:
    if name in _TEXTS:
        return isinstance(value, str)
    if value is None:
        return name in _OPTIONAL
    return isinstance(value, int | float) and math.isfinite(value)
