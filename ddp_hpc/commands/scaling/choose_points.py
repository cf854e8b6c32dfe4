"""Chooses the points of `ddp-hpc bench scaling` from the options and earlier requests in its directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.option_names import on_command_line
from ddp_hpc.bench.scaling import points as scaling
from ddp_hpc.bench.scaling import scaling_directory
from ddp_hpc.bench.scaling.points import Point, Settings, Size
from ddp_hpc.bench.scaling.scaling_directory import Plan
from ddp_hpc.commands.scaling.point_states import look
from ddp_hpc.training.telemetry.config import read_numbers

TRAINER = ("-m", "ddp_hpc.train")
# Options that may affect the speed of a point.
_SPEED_OPTIONS = ("profile", "job_file", "launcher", "mpi", "env", "setup", "fallback", "template")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The request of one call. `points` are the points of this call; `plan` also includes those of earlier
    calls.
    """

    folder: Path
    plan: Plan
    points: tuple[Point, ...]

    @property
    def settings(self) -> Settings:
        """The settings of all points."""
        return self.plan.settings

    def arguments(self, point: Point) -> list[str]:
        """Returns the training options of a point.

        Raises:
            RequestError: there are too few samples for one step.
        """
        return scaling.training_words(point, self.points, self.settings, self.folder / point.folder)


def counts(options: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Returns `--ranks` or `--nodes`, whichever was given, and its numbers; empty if neither was given.

    Raises:
        RequestError: both were given, or the numbers are not increasing.
    """
    typed = [(f"--{name}", options[name]) for name in ("ranks", "nodes") if options[name] is not None]
    if len(typed) > 1:
        raise RequestError(
            "--ranks and --nodes cannot be combined; use --ranks for numbers of ranks, or "
            "--nodes for full nodes"
        )
    if not typed:
        return "", ()
    option, text = typed[0]
    numbers = read_numbers(option, text)
    scaling.check_counts(option, numbers)
    return option, numbers


def make_request(options: Mapping[str, Any], sizes: Sequence[Size], added: Sequence[str] = ()) -> Request:
    """Creates the request for points of these sizes; `added` are training options besides the user's.

    Earlier requests in the directory are ignored if none of their points was started; otherwise strong
    scaling keeps their global batch.

    Raises:
        RequestError: a batch is not divisible by the ranks, or the directory contains other points.
    """
    folder: Path = options["folder"]
    modes = scaling.MODES if options["mode"] == "both" else (options["mode"],)
    before = _earlier_requests(folder)
    shared = options["global_batch"] or (before.settings.global_batch if before else 0)
    settings = Settings(
        batch_size=options["batch_size"],
        global_batch=(shared or options["batch_size"] * sizes[0].ranks) if "strong" in modes else 0,
        steps=options["steps"],
        warm_up=options["warm_up"],
        trace_steps=options["trace_steps"],
        training=(*options["training"], *added),
        launch=tuple(word for name in _SPEED_OPTIONS for word in _as_typed(name, options[name])),
    )
    points = {point for mode in modes for point in scaling.mode_points(mode, settings, sizes)}
    plan = scaling_directory.extend_plan(before, settings, dict.fromkeys(modes, tuple(sizes)))
    return Request(folder=folder, plan=plan, points=tuple(sorted(points)))


def _earlier_requests(folder: Path) -> Plan | None:
    """Returns the earlier requests of the directory, or None if no point is done, pending or running."""
    before = scaling_directory.read_plan(folder)
    if before is None:
        return None
    in_use = scaling_directory.is_in_use(folder)
    states = (look(folder, point, before.settings, in_use=in_use) for point in before.points())
    return before if any(state.measured or state.is_live for state in states) else None


def _as_typed(name: str, value: Any) -> list[str]:
    """Returns an option with its values as command-line arguments; empty if it was not given."""
    option = on_command_line(name.removesuffix("_file"))
    values = value if isinstance(value, tuple) else [value] if value else []
    texts = ("=".join(part) if isinstance(part, tuple) else str(part) for part in values)
    return [word for text in texts for word in (option, text)]
