"""What `ddp-hpc bench scaling` is asked for: points of one training on ever more ranks.

Weak scaling keeps the samples a rank, strong scaling those of a step. Both begin at the same point, which
is run once: a point is its ranks and its batch size, whatever it is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from ddp_hpc.bench.communication import TRACES
from ddp_hpc.errors import RequestError

MODES = ("weak", "strong")
SUMMARY, METRICS, LOG = "summary.json", "metrics.jsonl", "log.txt"

# All ranks, as a trace slows its own: one alone would never wait. Of many, as many as are read in seconds.
_MAX_TRACED = 8
_PROFILER_WARM_UP = 1
_MAX_RANKS = 10**7
_LEAST_SAMPLES = 2048
_OURS = (
    "--batch-size",
    "--epochs",
    "--max-steps",
    "--metrics",
    "--summary",
    "--trace-dir",
    "--trace-window",
    "--trace-ranks",
    "--snapshots",
    "--no-snapshots",
    "--snapshot-dir",
    "--snapshot-every-steps",
    "--snapshot-every-s",
)


@dataclass(frozen=True, order=True)
class Size:
    """How many ranks, and where."""

    ranks: int
    nodes: int
    ranks_per_node: int


@dataclass(frozen=True, order=True)
class Point:
    """One training that is measured."""

    size: Size
    batch_size: int
    """Samples a rank."""

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"ranks{self.size.ranks}-batch{self.batch_size}"

    def __str__(self) -> str:
        """`2 ranks, batches of 32`."""
        return f"{self.size.ranks} rank{'s' * (self.size.ranks > 1)}, batches of {self.batch_size}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all points of a folder have in common; points of other settings cannot be compared with them.

    `training` are options of `python -m ddp_hpc.train`, `launch` those of a job script that may change how
    fast it runs. `global_batch` is for strong scaling; 0: nobody has asked for it yet.
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
        """Steps of a point that is traced."""
        return self.warm_up + self.steps + (_PROFILER_WARM_UP + self.trace_steps if self.trace_steps else 0)


def check_counts(option: str, counts: Sequence[int]) -> None:
    """Raises RequestError unless the numbers of ranks or nodes rise, from 1 on."""
    text = ",".join(map(str, counts))
    if not counts or counts[0] < 1 or any(b <= a for a, b in pairwise(counts)):
        raise RequestError(f"{option} {text}: numbers that rise, from 1 on, are needed, such as 1,2,4")
    if counts[-1] > _MAX_RANKS:
        raise RequestError(f"{option} {text}: no machine has so many; ask for at most {_MAX_RANKS}")


def check_training(words: Sequence[str]) -> None:
    """Raises RequestError for options of the training that are the benchmark's to give."""
    if words and not words[0].startswith("-"):
        raise RequestError(
            f"{words[0]!r} was given after --: the points run python -m ddp_hpc.train, whose options alone "
            "come there, such as -- --model linear"
        )
    for word in words:
        option = word.partition("=")[0]
        if option == "--batch-size":
            raise RequestError("--batch-size is an option of the benchmark itself: give it before the --")
        if option in _OURS:
            raise RequestError(f"{option} is given to each point by the benchmark; leave it out")


def doubled(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, and `most` itself at the end."""
    found = [1]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return tuple(found if found[-1] == most else [*found, most])


def weak_points(settings: Settings, sizes: Sequence[Size]) -> list[Point]:
    """A point of the same batch size a rank for each number of ranks."""
    return [Point(size, settings.batch_size) for size in sizes]


def strong_points(settings: Settings, sizes: Sequence[Size]) -> list[Point]:
    """A point of the same global batch for each number of ranks.

    Raises:
        RequestError: the ranks cannot share it evenly.
    """
    samples = settings.global_batch
    for size in sizes:
        if samples % size.ranks:
            fitting = ceil(samples / size.ranks) * size.ranks
            raise RequestError(
                f"strong scaling shares {samples} samples a step, and {size.ranks} ranks cannot do that "
                f"evenly; take other numbers, or a --global-batch such as {fitting}"
            )
    return [Point(size, samples // size.ranks) for size in sizes]


def mode_points(mode: str, settings: Settings, sizes: Sequence[Size]) -> list[Point]:
    """The points of a mode, in the order of their ranks."""
    return (weak_points if mode == "weak" else strong_points)(settings, sizes)


def training_words(point: Point, points: Sequence[Point], settings: Settings, folder: Path) -> list[str]:
    """The options of `python -m ddp_hpc.train` for a point whose files go into `folder`.

    Among all `points` the synthetic data is the same, and large enough for each one's steps.

    Raises:
        RequestError: --num-samples of the user's are too few for one step.
    """
    words = [*settings.training]
    a_step = max(one.size.ranks * one.batch_size for one in points) * _number(words, "--accumulate", 1)
    given = _number(words, "--num-samples", 0)
    if not given:
        words += ["--num-samples", str(ceil(_LEAST_SAMPLES / a_step) * a_step)]
    elif given < a_step and not _has(words, "--data"):
        raise RequestError(
            f"--num-samples {given}: the largest point takes {a_step} samples a step; ask for that at least"
        )
    is_traced = settings.trace_steps > 0 and point.size.ranks > 1
    steps = settings.total_steps if is_traced else settings.warm_up + settings.steps
    # Each epoch has at least one step.
    words += ["--batch-size", str(point.batch_size), "--max-steps", str(steps), "--epochs", str(steps)]
    words += ["--no-snapshots", "--metrics", str(folder / METRICS), "--summary", str(folder / SUMMARY)]
    if is_traced:
        window = settings.warm_up + settings.steps, _PROFILER_WARM_UP, settings.trace_steps, 1
        ranks = "all" if point.size.ranks <= _MAX_TRACED else ",".join(map(str, range(_MAX_TRACED)))
        words += ["--trace-dir", str(folder / TRACES), "--trace-window", ",".join(map(str, window))]
        words += ["--trace-ranks", ranks]
    return words


def differing(old: Settings, new: Settings) -> str:
    """What differs between two settings, for people; empty where points can be compared."""
    for name in old.__dataclass_fields__:
        before: Any = getattr(old, name)
        after: Any = getattr(new, name)
        if before == after or (name == "global_batch" and not (before and after)):
            continue
        if isinstance(before, tuple):
            before, after = (" ".join(one) or "none" for one in (before, after))
        what = {"training": "options after --", "launch": "options of the launch"}.get(name)
        return f"{what or '--' + name.replace('_', '-')} {before} (now {after})"
    return ""


def _has(words: Sequence[str], option: str) -> bool:
    return any(word.partition("=")[0] == option for word in words)


def _number(words: Sequence[str], option: str, default: int) -> int:
    """The last value of an option of whole numbers; the trainer itself complains of anything else."""
    texts = [after for word, after in pairwise(words) if word == option]
    texts += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return int(texts[-1][:9]) if texts and texts[-1].isascii() and texts[-1].isdigit() else default
