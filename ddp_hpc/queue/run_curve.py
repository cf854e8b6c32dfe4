"""The progress of a run over all its jobs: the loss, the speed, and the waits for data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.queue.run_timeline import Launch, Line, Steps, read_timeline


@dataclass(frozen=True, kw_only=True)
class Point:
    """The last `num_steps` steps until `step`, which were complete at `at_s` (seconds since the Unix epoch).

    They took `duration_s`, and rank 0 waited for data during `data_s` of it. `loss` is their mean loss; None
    if it was not recorded. `attempt` is the number of the attempt, of which each new run has a first one, and
    `job_id` its job. `is_kept` is whether no later attempt repeated the steps.
    """

    attempt: str
    job_id: str
    at_s: float
    step: int
    num_steps: int
    duration_s: float
    data_s: float
    loss: float | None
    is_kept: bool

    @property
    def steps_per_s(self) -> float | None:
        """The speed; None if it is unknown."""
        return self.num_steps / self.duration_s if self.duration_s > 0 else None

    @property
    def data_share(self) -> float | None:
        """The share of the time in which rank 0 waited for data; None if it is unknown."""
        return self.data_s / self.duration_s if self.duration_s > 0 else None


def run_curve(run_dir: Path) -> list[Point]:
    """Returns the progress of the run, oldest first; nothing if no steps were recorded."""
    return [
        point
        for job in read_timeline(run_dir)
        for launch in job.launches
        for steps in launch.steps
        for point in (_of_done(launch, steps) if steps.done else _of_saved(launch, steps))
    ]


def _of_done(launch: Launch, steps: Steps) -> Iterator[Point]:
    for line in steps.done:
        yield _point(launch, steps, line, int(line["num_steps"]), line["steps_s"], line["data_s"])


def _of_saved(launch: Launch, steps: Steps) -> Iterator[Point]:
    """Yields the progress between snapshots. The time of it includes evaluations."""
    before = {"at_s": steps.began_s, "step": steps.first_step, "save_s": 0.0, "data_s": 0.0}
    for line in steps.saved:
        duration_s = line["at_s"] - before["at_s"] - (line["save_s"] - before["save_s"])
        if num_steps := int(line["step"] - before["step"]):
            yield _point(launch, steps, line, num_steps, duration_s, line["data_s"] - before["data_s"])
        before = line


def _point(
    launch: Launch, steps: Steps, line: Line, num_steps: int, duration_s: float, data_s: float
) -> Point:
    attempt, _, job_id = launch.key.partition(" ")
    return Point(
        attempt=attempt,
        job_id=job_id,
        at_s=line["at_s"],
        step=int(line["step"]),
        num_steps=num_steps,
        duration_s=duration_s,
        data_s=data_s,
        loss=line.get("loss"),
        is_kept=line["step"] <= steps.limit,
    )
