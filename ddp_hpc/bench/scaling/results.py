"""Reads the finished points of a scaling benchmark, and computes rows relative to the smallest point."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.text_table import Row
from ddp_hpc.base.units import counted
from ddp_hpc.bench.scaling.exposed_communication import communication_share
from ddp_hpc.bench.scaling.points import METRICS, SUMMARY, Point, Settings
from ddp_hpc.bench.scaling.scaling_directory import Asked

_LEAST_STEPS = 3
_MAX_BYTES = 64 * 1024 * 1024
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
        about = _summary(directory)
        steps = _timed_steps(directory, settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotMeasuredError(
            f"{directory}: {SUMMARY} or {METRICS} is damaged ({type(error).__name__}); rerun the point"
        ) from None
    ranks, of_data = about["world"]["world_size"], about["data"]["samples"]
    if about["stopped"]:
        raise NotMeasuredError(f"the run stopped early ({about['stopped']}); request a longer --walltime")
    if ranks != point.size.ranks:
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


def _summary(directory: Path) -> dict[str, Any]:
    """Reads the summary, and checks the fields that are used later."""
    about: dict[str, Any] = json.loads(_read(directory / SUMMARY))
    texts = [about[name] for name in ("created", "backend", "device", "strategy")]
    texts += [about["model"]["name"], about.get("device_name", ""), about["world"].get("hostname", "")]
    numbers = [about["world"]["world_size"], about["world"]["num_nodes"], about["data"]["samples"]]
    numbers += [about["threads"], about["model"]["parameters"]]
    if not all(isinstance(text, str) for text in [*texts, *about["versions"].values()]):
        raise TypeError
    if not all(type(number) is int and number >= 1 for number in numbers):
        raise TypeError
    about["stopped"]
    return about


def _timed_steps(directory: Path, settings: Settings) -> list[tuple[int, float, float]]:
    """Returns samples, waiting time for data and duration of the steps between warm-up and trace."""
    records = [json.loads(line) for line in _read(directory / METRICS).splitlines()]
    last = settings.warm_up + settings.steps
    timed = [
        (int(one["samples"]), float(one["data_s"]), float(one["step_s"]))
        for one in records
        if settings.warm_up < int(one["step"]) <= last
    ]
    if not all(0 <= data_s < math.inf and 0 < step_s < math.inf for _, data_s, step_s in timed):
        raise ValueError
    return timed


def _read(path: Path) -> str:
    with path.open("rb") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError
    return text.decode("utf-8")


def document(asked: Asked, found: Mapping[Point, Measured]) -> dict[str, Any]:
    """Returns the JSON document with the rows of each mode, the machine and the settings.

    `found` contains at least one point.
    """
    latest = max(found.values(), key=lambda one: str(one.about["created"]))
    largest = max(found.values(), key=lambda one: one.point)
    about = latest.about
    machine = {
        "host": about["world"].get("hostname", ""),
        "device": about["device"].split(":")[0],
        "device_name": about.get("device_name", ""),
        "backend": largest.about["backend"],
        "threads": about["threads"],
        "ranks_per_node": max(one.point.size.ranks_per_node for one in found.values()),
        "nodes": max(one.nodes for one in found.values()),
    }
    settings = {name: getattr(asked.settings, name) for name in ("warm_up", "steps", "trace_steps")}
    settings |= {
        "training": list(asked.settings.training),
        "model": about["model"]["name"],
        "parameters": about["model"]["parameters"],
        "strategy": largest.about["strategy"],
    }
    return {
        "name": "scaling",
        "created": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "measured": about["created"],
        "versions": about["versions"],
        "machine": machine,
        "settings": settings,
        "rows": [row for mode in asked.sizes for row in rows(mode, asked.of_mode(mode), found)],
    }


def rows(mode: str, points: Sequence[Point], found: Mapping[Point, Measured]) -> list[Row]:
    """Returns a row per finished point of a mode, with speed-up and efficiency relative to the first one."""
    done = [found[point] for point in points if point in found]
    return [_row(mode, one, done[0]) for one in done]


def _row(mode: str, one: Measured, base: Measured) -> Row:
    speedup = one.samples_per_s / base.samples_per_s
    return {
        "name": mode,
        "ranks": one.point.size.ranks,
        "nodes": one.nodes,
        "ranks_per_node": one.point.size.ranks_per_node,
        "batch_size": one.point.batch_size,
        "global_batch": one.samples,
        "steps": one.steps,
        "samples_per_s": one.samples_per_s,
        "step_s": one.step_s,
        "step_p90_s": one.step_p90_s,
        "base_ranks": base.point.size.ranks,
        "speedup": speedup,
        "efficiency": speedup * base.point.size.ranks / one.point.size.ranks,
        "comm_share": one.comm_share,
        "data_share": one.data_share,
    }


def differences(found: Mapping[Point, Measured]) -> list[str]:
    """Returns a line for each property other than the number of ranks in which points differ."""
    lines = []
    for name in _ALIKE:
        values: dict[str, Point] = {}
        for point, one in sorted(found.items()):
            if name != "strategy" or point.size.ranks > 1:  # a single rank has no strategy
                values.setdefault(str(one.about.get(name)), point)
        if len(values) > 1:
            listed = "; ".join(f"{point}: {value}" for value, point in values.items())
            lines.append(
                f"the points differ not only in ranks, but also in {name.replace('_', ' ')} ({listed})"
            )
    return lines
