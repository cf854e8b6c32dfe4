"""The signal of `--requeue on-signal` in a job whose walltime was changed."""

from __future__ import annotations

import time
from typing import cast

from ddp_hpc.supervisor.job_clock import JobClock
from ddp_hpc.supervisor.run_watch import RunWatch


class Clock:
    """A job that ends in 5 s, unless the scheduler reports another end when it is asked again."""

    def __init__(self, reported_s: float) -> None:
        self.end_s = time.time() + 5
        self.reported_s = reported_s

    def ask_again(self) -> None:
        self.end_s = self.reported_s


def watch_of(clock: Clock) -> RunWatch:
    return RunWatch(
        cast("JobClock", clock),
        "mpiexec",
        forwards_term="",
        files=None,
        attempt=None,
        begin_limit_s=None,
        find_lost_nodes=list,
        find_hang=str,
        final_states=(),
        signal_name="TERM",
        signal_lead_s=10.0,
        say=print,
    )


def test_the_signal_is_sent_once_if_the_walltime_was_not_changed() -> None:
    watch = watch_of(Clock(time.time() + 5))
    assert [watch.early_signal() for _ in range(2)] == ["TERM", ""]


def test_in_an_extended_job_the_signal_is_sent_before_the_new_end() -> None:
    clock = Clock(time.time() + 3600)
    watch = watch_of(clock)
    assert watch.early_signal() == ""
    clock.end_s = clock.reported_s = time.time() + 5
    assert watch.early_signal() == "TERM"
