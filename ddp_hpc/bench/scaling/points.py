"""The points and settings of `ddp-hpc bench scaling`, which runs one training on increasing numbers of ranks.

Weak scaling uses the same number of samples per rank at all points, strong scaling the same number of
samples per step. A point is defined only by its number of ranks and its batch size, so the smallest point
can belong to both, and is then run once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.option_names import on_command_line
from ddp_hpc.base.units import counted

MODES = ("weak", "strong")
SUMMARY, METRICS, LOG, TRACES = "summary.json", "metrics.jsonl", "log.txt", "trace"

# The maximum number of traced ranks, so that reading the traces takes only seconds. If there are at most this
# many ranks, all are traced: a single traced rank would be slower than the others and would never wait for
# them.
_MAX_TRACED = 8
_PROFILER_WARM_UP = 1
_MAX_RANKS = 10**7
_LEAST_SAMPLES = 2048


@dataclass(frozen=True, order=True)
class Size:
    """The number of ranks and their distribution over nodes."""

    ranks: int
    nodes: int
    ranks_per_node: int


@dataclass(frozen=True, order=True)
class Point:
    """One training run that the benchmark measures."""

    size: Size
    batch_size: int
    """Samples per rank."""

    @property
    def folder(self) -> str:
        """The name of the point's directory."""
        return f"ranks{self.size.ranks}-batch{self.batch_size}"

    def __str__(self) -> str:
        """Returns a description such as `2 ranks, batches of 32`."""
        return f"{counted(self.size.ranks, 'rank')}, batches of {self.batch_size}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings common to all points in a directory; points with other settings are not comparable.

    `training` are options of `python -m ddp_hpc.train`, and `launch` are options of the job script that may
    affect the speed. `global_batch` is for strong scaling, and 0 if that has not been requested yet.
    """

    batch_size: int
    global_batch: int
    steps: int
    warm_up: int
    trace_steps: int
    training: tuple[str, ...]
    launch: tuple[str, ...]

    @property
    def total_steps(self) -> int:
        """The number of steps of a traced point."""
        return self.warm_up + self.steps + (_PROFILER_WARM_UP + self.trace_steps if self.trace_steps else 0)


def check_counts(option: str, counts: Sequence[int]) -> None:
    """Raises RequestError unless the numbers of ranks or nodes are positive and increasing."""
    text = ",".join(map(str, counts))
    if not counts or counts[0] < 1 or any(b <= a for a, b in pairwise(counts)):
        raise RequestError(f"{option} {text}: the numbers must be positive and increasing, such as 1,2,4")
    if counts[-1] > _MAX_RANKS:
        raise RequestError(f"{option} {text}: the numbers must not exceed {_MAX_RANKS}")


def check_training(words: Sequence[str]) -> None:
    """Raises RequestError for options of the training that are set by the benchmark."""
    if words and not words[0].startswith("-"):
        raise RequestError(
            f"{words[0]!r} after -- is not an option; only options of python -m ddp_hpc.train are allowed "
            "there, such as -- --model linear"
        )
    settings = Settings(
        batch_size=1, global_batch=0, steps=1, warm_up=1, trace_steps=1, training=(), launch=()
    )
    own = {*filter(_is_option, _own_words(Point(Size(2, 1, 2), 1), settings, Path()))}
    for word in words:
        option = word.partition("=")[0]
        if option == "--batch-size":
            raise RequestError("--batch-size is an option of the benchmark; put it before the --")
        if option in own or (_is_option(option) and "snapshot" in option):
            raise RequestError(
                f"{option} cannot be given, because the benchmark sets it for each point; omit it"
            )


def _is_option(word: str) -> bool:
    return word.startswith("--")


def doubled(most: int) -> tuple[int, ...]:
    """Returns 1, 2, 4 and so on up to `most`, which is included."""
    numbers = [1]
    while numbers[-1] * 2 < most:
        numbers.append(numbers[-1] * 2)
    return tuple(dict.fromkeys([*numbers, most]))


def mode_points(mode: str, settings: Settings, sizes: Sequence[Size]) -> list[Point]:
    """Returns the points of a mode, one for each size.

    Weak scaling has the same batch size per rank at all points, strong scaling the same global batch.

    Raises:
        RequestError: in strong scaling, the global batch is not divisible by a number of ranks.
    """
    if mode == "weak":
        return [Point(size, settings.batch_size) for size in sizes]
    samples = settings.global_batch
    for size in sizes:
        if samples % size.ranks:
            fitting = ceil(samples / size.ranks) * size.ranks
            raise RequestError(
                f"{samples} samples per step cannot be divided evenly among {size.ranks} ranks for strong "
                f"scaling; use other numbers of ranks, or a --global-batch such as {fitting}"
            )
    return [Point(size, samples // size.ranks) for size in sizes]


def training_words(point: Point, points: Sequence[Point], settings: Settings, directory: Path) -> list[str]:
    """Returns the options of `python -m ddp_hpc.train` for a point with its files in `directory`.

    All `points` use the same synthetic data, which is large enough for a step of the largest point.

    Raises:
        RequestError: --num-samples given by the user is too small for one step.
    """
    words = [*settings.training]
    a_step = max(other.size.ranks * other.batch_size for other in points) * _number(words, "--accumulate", 1)
    given = _number(words, "--num-samples", 0)
    if not given:
        words += ["--num-samples", str(ceil(_LEAST_SAMPLES / a_step) * a_step)]
    elif given < a_step and not any(word.partition("=")[0] == "--data" for word in words):
        raise RequestError(
            f"--num-samples {given} is too small, since the largest point uses {a_step} samples per step; "
            f"use at least {a_step}"
        )
    return [*words, *_own_words(point, settings, directory)]


def _own_words(point: Point, settings: Settings, directory: Path) -> list[str]:
    """Returns the options that the benchmark sets for each point."""
    is_traced = settings.trace_steps > 0 and point.size.ranks > 1
    steps = settings.total_steps if is_traced else settings.warm_up + settings.steps
    # An epoch has at least one step, so this number of epochs is sufficient.
    words = ["--batch-size", str(point.batch_size), "--max-steps", str(steps), "--epochs", str(steps)]
    words += ["--no-snapshots", "--metrics", str(directory / METRICS), "--summary", str(directory / SUMMARY)]
    if is_traced:
        window = settings.warm_up + settings.steps, _PROFILER_WARM_UP, settings.trace_steps, 1
        ranks = "all" if point.size.ranks <= _MAX_TRACED else ",".join(map(str, range(_MAX_TRACED)))
        words += ["--trace-dir", str(directory / TRACES), "--trace-window", ",".join(map(str, window))]
        words += ["--trace-ranks", ranks]
    return words


def differing(old: Settings, new: Settings) -> str:
    """Describes the first difference between two settings; empty if their points are comparable."""
    for name in old.__dataclass_fields__:
        before: Any = getattr(old, name)
        after: Any = getattr(new, name)
        if before == after or (name == "global_batch" and not (before and after)):
            continue
        if isinstance(before, tuple):
            before, after = (" ".join(words) or "none" for words in (before, after))
        what = {"training": "options after --", "launch": "launch options"}.get(name)
        return f"{what or on_command_line(name)} {before} (now {after})"
    return ""


def _number(words: Sequence[str], option: str, default: int) -> int:
    """Returns the last value of an integer option; the trainer reports invalid values."""
    texts = [after for word, after in pairwise(words) if word == option]
    texts += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return int(texts[-1][:9]) if texts and texts[-1].isascii() and texts[-1].isdigit() else default
