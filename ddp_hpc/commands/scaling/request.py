"""The options of `ddp-hpc bench scaling` as sizes, settings and points, beside what its folder holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.bench import scaling, scaling_folder
from ddp_hpc.bench.scaling import Point, Settings, Size
from ddp_hpc.bench.scaling_folder import Asked
from ddp_hpc.commands.scaling.states import look
from ddp_hpc.errors import RequestError
from ddp_hpc.training.config import parse_numbers

TRAINER = ("-m", "ddp_hpc.train")
# What may change how fast a point runs.
_OF_SPEED = ("profile", "job_file", "launcher", "mpi", "env", "setup", "fallback", "template")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call: `points` are those of this call, the smallest first; `asked` has earlier ones too."""

    folder: Path
    asked: Asked
    points: tuple[Point, ...]

    @property
    def settings(self) -> Settings:
        """What all points have in common."""
        return self.asked.settings

    def words(self, point: Point) -> list[str]:
        """The options of a point's training.

        Raises:
            RequestError: there are too few samples for one step.
        """
        return scaling.training_words(point, self.points, self.settings, self.folder / point.folder)


def counts(options: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """`--ranks` or `--nodes`, whichever was given, and its numbers; nothing where neither was.

    Raises:
        RequestError: both were, or they are no numbers that rise.
    """
    typed = [(f"--{name}", options[name]) for name in ("ranks", "nodes") if options[name] is not None]
    if len(typed) > 1:
        raise RequestError("--ranks and --nodes were given; give one: --nodes fills the nodes with ranks")
    if not typed:
        return "", ()
    option, text = typed[0]
    found = parse_numbers(option, text)
    scaling.check_counts(option, found)
    return option, found


def make_request(options: Mapping[str, Any], sizes: Sequence[Size], more: Sequence[str] = ()) -> Request:
    """The request for points of these sizes; `more` are options of the training beside the user's.

    What the folder was asked for before is forgotten where nothing has come of it; else strong scaling
    goes on with its global batch.

    Raises:
        RequestError: ranks that cannot share a batch, or a folder of other points.
    """
    folder: Path = options["folder"]
    modes = scaling.MODES if options["mode"] == "both" else (options["mode"],)
    before = _what_came_of_it(folder)
    shared = options["global_batch"] or (before.settings.global_batch if before else 0)
    settings = Settings(
        batch_size=options["batch_size"],
        global_batch=(shared or options["batch_size"] * sizes[0].ranks) if "strong" in modes else 0,
        steps=options["steps"],
        warm_up=options["warm_up"],
        trace_steps=options["trace_steps"],
        training=(*options["training"], *more),
        launch=tuple(word for name in _OF_SPEED for word in _as_typed(name, options[name])),
    )
    points = {point for mode in modes for point in scaling.mode_points(mode, settings, sizes)}
    asked = scaling_folder.asked_now(before, settings, dict.fromkeys(modes, tuple(sizes)))
    return Request(folder=folder, asked=asked, points=tuple(sorted(points)))


def _what_came_of_it(folder: Path) -> Asked | None:
    """What the folder was asked for before; None where no point of it is done, waits or runs."""
    before = scaling_folder.read_folder(folder)
    if before is None:
        return None
    in_use = scaling_folder.is_in_use(folder)
    states = (look(folder, point, before.settings, in_use=in_use) for point in before.points())
    return before if any(state.measured or state.is_live for state in states) else None


def _as_typed(name: str, value: Any) -> list[str]:
    """The words of an option; none where it was not given."""
    option = "--" + name.removesuffix("_file").replace("_", "-")
    values = value if isinstance(value, tuple) else [value] if value else []
    return [word for one in values for word in (option, str(one))]
