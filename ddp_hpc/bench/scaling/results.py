"""Reads the finished points of a scaling benchmark, and computes rows relative to the smallest point."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.text_table import Row
from ddp_hpc.base.units import counted
from ddp_hpc.bench.scaling.points import METRICS, SUMMARY, TRACES, Point, Settings

_LEAST_STEPS = 3
# Fields of the summary that must be equal, so that points differ only in their number of ranks.
_ALIKE = ("device_name", "threads", "versions", "strategy")


class NotMeasuredError(DdpHpcError):
    """The run of a point has ended without usable results."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The results of a finished point, with times in seconds.

    Shares are fractions of the step time; `comm_share` is that of the traced steps. `about` is the summary
    of the run.
    """

    point: Point
    nodes: int
    samples: int
    """Samples per step on all ranks."""
    steps: int
    """Number of timed steps."""
    step_s: float
    """Median time of a step."""
    step_p90_s: float
    data_share: float
    comm_share: float | None
    about: Mapping[str, Any]

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks."""
        return self.samples / self.step_s


def read_point(directory: Path, point: Point, settings: Settings) -> Measured | None:
    """Reads the results of a point; None if it has no summary and is therefore not done.

    Warm-up steps, traced steps, and smaller steps at the end of an epoch are not included.

    Raises:
        NotMeasuredError: the files are not those of a complete run of this point.
    """
    if not (directory / SUMMARY).exists():
        return None
    try:
        about = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
        ranks, of_data = about["world"]["world_size"], about["data"]["samples"]
        steps = _timed_steps(directory, settings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotMeasuredError(
            f"{directory}: {SUMMARY} or {METRICS} is damaged ({type(error).__name__}); rerun the point"
        ) from None
    if about["stopped"]:
        raise NotMeasuredError(f"the run stopped early ({about['stopped']}); request a longer --walltime")
    if ranks != point.ranks:
        raise NotMeasuredError(f"the run used {counted(ranks, 'rank')}; check its launcher and its log")
    samples = max((number for number, _, _ in steps), default=0)
    full = [(data_s, step_s) for number, data_s, step_s in steps if number == samples]
    times = sorted(step_s for _, step_s in full)
    if len(times) < min(_LEAST_STEPS, settings.steps):
        raise NotMeasuredError(
            f"{METRICS} contains only {len(times)} full steps after {settings.warm_up} warm-up steps; "
            "increase --steps, or the number of samples per epoch"
        )
    if samples == of_data < ranks * point.batch_size:
        raise NotMeasuredError(
            f"the data has {of_data} samples, fewer than {counted(ranks, 'rank')} need for one step; use "
            "more data, or a smaller --batch-size"
        )
    return Measured(
        point=point,
        nodes=about["world"]["num_nodes"],
        samples=samples,
        steps=len(times),
        step_s=statistics.median(times),
        step_p90_s=times[math.ceil(0.9 * len(times)) - 1],
        data_share=sum(data_s for data_s, _ in full) / sum(times),
        comm_share=0.0 if ranks == 1 else communication_share(directory),
        about=about,
    )


def _timed_steps(directory: Path, settings: Settings) -> list[tuple[int, float, float]]:
    """Returns samples, waiting time for data and duration of the steps between warm-up and trace."""
    records = [json.loads(line) for line in (directory / METRICS).read_text(encoding="utf-8").splitlines()]
    last = settings.warm_up + settings.steps
    return [
        (record["samples"], record["data_s"], record["step_s"])
        for record in records
        if settings.warm_up < record["step"] <= last
    ]


def communication_share(directory: Path) -> float | None:
    """Returns the mean share of exposed communication over the ranks traced in `directory`/trace, or None if
    it is unknown.

    It is computed as in `ddp-hpc report`, and includes waiting for slower ranks. Traces that are damaged or
    contain no collectives are skipped, since the names of a backend's collectives may be unknown.
    """
    if missing_package():
        return None
    from ddp_hpc.trace.analyze_rank import read_rank

    shares = []
    for path in sorted((directory / TRACES).glob("*.json.gz")):
        try:
            trace = read_rank(path)
        except OSError:
            continue
        if trace.steps and trace.collectives:
            times = [step.times for step in trace.steps]
            shares.append(sum(step.comm_exposed_s for step in times) / sum(step.wall_s for step in times))
    return statistics.fmean(shares) if shares else None


def missing_package() -> str:
    """Returns a package required for reading traces that is not installed, or an empty string."""
    return next((name for name in ("numpy", "msgspec") if find_spec(name) is None), "")


def document(
    modes: Mapping[str, Sequence[Point]], settings: Settings, measured: Mapping[Point, Measured]
) -> dict[str, Any]:
    """Returns the JSON document with the rows of each mode, the machine and the settings.

    `measured` contains at least one point.
    """
    latest = max(measured.values(), key=lambda result: str(result.about["created"]))
    largest = max(measured.values(), key=lambda result: result.point)
    about = latest.about
    return {
        "name": "scaling",
        "created": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "measured": about["created"],
        "versions": about["versions"],
        "machine": {
            "host": about["world"].get("hostname", ""),
            "device": about["device"].split(":")[0],
            "device_name": about.get("device_name", ""),
            "backend": largest.about["backend"],
            "threads": about["threads"],
            "nodes": max(result.nodes for result in measured.values()),
        },
        "settings": {
            "warm_up": settings.warm_up,
            "steps": settings.steps,
            "trace_steps": settings.trace_steps,
            "training": list(settings.training),
            "model": about["model"]["name"],
            "parameters": about["model"]["parameters"],
            "strategy": largest.about["strategy"],
        },
        "rows": [row for mode, points in modes.items() for row in rows(mode, points, measured)],
    }


def rows(mode: str, points: Sequence[Point], measured: Mapping[Point, Measured]) -> list[Row]:
    """Returns a row per finished point of a mode, with speed-up and efficiency relative to the first one."""
    done = [measured[point] for point in points if point in measured]
    return [_row(mode, result, done[0]) for result in done]


def _row(mode: str, result: Measured, base: Measured) -> Row:
    speedup = result.samples_per_s / base.samples_per_s
    return {
        "name": mode,
        "ranks": result.point.ranks,
        "nodes": result.nodes,
        "batch_size": result.point.batch_size,
        "global_batch": result.samples,
        "steps": result.steps,
        "samples_per_s": result.samples_per_s,
        "step_s": result.step_s,
        "step_p90_s": result.step_p90_s,
        "base_ranks": base.point.ranks,
        "speedup": speedup,
        "efficiency": speedup * base.point.ranks / result.point.ranks,
        "comm_share": result.comm_share,
        "data_share": result.data_share,
    }


def differences(measured: Mapping[Point, Measured]) -> list[str]:
    """Returns a line for each property other than the number of ranks in which points differ."""
    lines = []
    for name in _ALIKE:
        values: dict[str, Point] = {}
        for point, result in sorted(measured.items()):
            if name != "strategy" or point.ranks > 1:  # a single rank has no strategy
                values.setdefault(str(result.about.get(name)), point)
        if len(values) > 1:
            listed = "; ".join(f"{point}: {value}" for value, point in values.items())
            lines.append(
                f"the points differ not only in ranks, but also in {name.replace('_', ' ')} ({listed})"
            )
    return lines
