"""The points of `ddp-hpc bench scaling`, which runs the same training on increasing numbers of ranks.

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

from ddp_hpc.base.errors import RequestError
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
class Point:
    """One training run that the benchmark measures."""

    ranks: int
    batch_size: int
    """Samples per rank."""

    @property
    def folder(self) -> str:
        """The name of the point's directory."""
        return f"ranks{self.ranks}-batch{self.batch_size}"

    def __str__(self) -> str:
        """Returns a description such as `2 ranks, batches of 32`."""
        return f"{counted(self.ranks, 'rank')}, batches of {self.batch_size}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of all points. `training` are options of `python -m ddp_hpc.train`."""

    steps: int
    warm_up: int
    trace_steps: int
    training: tuple[str, ...]


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
    settings = Settings(steps=1, warm_up=1, trace_steps=1, training=())
    own = {*filter(_is_option, _own_words(Point(2, 1), settings, Path()))}
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


def mode_points(mode: str, ranks: Sequence[int], batch_size: int, global_batch: int | None) -> list[Point]:
    """Returns the points of a mode, one for each number of ranks.

    Weak scaling has the same batch size per rank at all points, strong scaling the same global batch, which
    is that of the smallest number of ranks by default.

    Raises:
        RequestError: in strong scaling, the global batch is not divisible by a number of ranks.
    """
    if mode == "weak":
        return [Point(number, batch_size) for number in ranks]
    samples = global_batch or batch_size * ranks[0]
    for number in ranks:
        if samples % number:
            fitting = ceil(samples / number) * number
            raise RequestError(
                f"{samples} samples per step cannot be divided evenly among {number} ranks for strong "
                f"scaling; use other numbers of ranks, or a --global-batch such as {fitting}"
            )
    return [Point(number, samples // number) for number in ranks]


def training_words(point: Point, settings: Settings, directory: Path) -> list[str]:
    """Returns the options of `python -m ddp_hpc.train` for a point with its files in `directory`.

    Unless the user has chosen --num-samples, there are enough synthetic samples for one step.
    """
    words = [*settings.training]
    if not _value(words, "--num-samples"):
        accumulate = _value(words, "--accumulate")
        a_step = point.ranks * point.batch_size * (int(accumulate[:9]) if accumulate.isdecimal() else 1)
        words += ["--num-samples", str(ceil(_LEAST_SAMPLES / max(1, a_step)) * a_step)]
    return [*words, *_own_words(point, settings, directory)]


def _own_words(point: Point, settings: Settings, directory: Path) -> list[str]:
    """Returns the options that the benchmark sets for each point."""
    is_traced = settings.trace_steps > 0 and point.ranks > 1
    timed = settings.warm_up + settings.steps
    steps = timed + (_PROFILER_WARM_UP + settings.trace_steps if is_traced else 0)
    # An epoch has at least one step, so this number of epochs is sufficient.
    words = ["--batch-size", str(point.batch_size), "--max-steps", str(steps), "--epochs", str(steps)]
    words += ["--no-snapshots", "--metrics", str(directory / METRICS), "--summary", str(directory / SUMMARY)]
    if is_traced:
        window = timed, _PROFILER_WARM_UP, settings.trace_steps, 1
        ranks = "all" if point.ranks <= _MAX_TRACED else ",".join(map(str, range(_MAX_TRACED)))
        words += ["--trace-dir", str(directory / TRACES), "--trace-window", ",".join(map(str, window))]
        words += ["--trace-ranks", ranks]
    return words


def _value(words: Sequence[str], option: str) -> str:
    """Returns the last value of an option, or an empty string."""
    texts = [after for word, after in pairwise(words) if word == option]
    texts += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return texts[-1] if texts else ""
