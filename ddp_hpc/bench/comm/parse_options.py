"""Parses and checks the options of `ddp-hpc bench comm` before anything is started. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.base.option_names import on_command_line
from ddp_hpc.base.units import parse_bytes

_SWEEP: dict[str, Any] = {"min_bytes": "1KiB", "max_bytes": "64MiB", "factor": 4}
_LEAST_ITERATIONS = 5
_SIZE_OPTIONS = ("bytes", "min_bytes", "max_bytes", "factor")
KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
_SPLIT = ("all_gather", "reduce_scatter", "all_to_all")
"""The collectives whose number of elements must be a multiple of the number of ranks."""


def num_elements(kind: str, num_bytes: int, itemsize: int, num_ranks: int) -> int:
    """Returns the total number of elements for a size, rounded down as in nccl-tests, but never to zero.

    Sizes are defined as in nccl-tests (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md and
    src/sendrecv.cu): the size of the input of one rank, or of its output if that is larger.
    """
    share = num_ranks if kind in _SPLIT else 1
    return max(num_bytes // itemsize // share, 1) * share


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How many iterations of a collective are timed for one row."""

    warmup: int = 5
    iterations: int = 100
    seconds: float = 2.0
    """Time limit in seconds, which can reduce the number of iterations to 5, but not further."""

    def num_iterations(self, taken_s: float) -> int:
        """Returns the number of iterations, given the duration of one; 0 if it was not measured."""
        affordable = self.seconds / taken_s if taken_s > 0 else inf
        return min(self.iterations, max(_LEAST_ITERATIONS, int(min(affordable, self.iterations))))


@dataclass(frozen=True, kw_only=True)
class CommBench:
    """The options of `ddp-hpc bench comm`."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]  # in bytes
    dtype: str
    effort: Effort
    json_file: Path | None = None


def parse(**options: Any) -> CommBench:
    """Checks the options, which are None or empty if they were not given.

    Raises:
        RequestError: an option is invalid, or options contradict each other.
    """
    sweep = {name: options.pop(name) for name in _SIZE_OPTIONS}
    if not 0 <= options["seconds"] < inf:
        raise RequestError(f"--seconds must be finite and at least 0 (got {options['seconds']})")
    effort = Effort(**{name: options.pop(name) for name in ("warmup", "iterations", "seconds")})
    return CommBench(
        collectives=parse_collectives(options.pop("collectives")),
        sizes=parse_sizes(sweep.pop("bytes"), **sweep),
        effort=effort,
        **options,
    )


def parse_collectives(text: str | None) -> tuple[str, ...]:
    """Parses a list such as `all_reduce,send_recv`, without duplicates; None selects all collectives.

    Raises:
        RequestError: a collective is unknown.
    """
    if text is None:
        return KINDS
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in KINDS:
            raise RequestError(
                f"--collectives: unknown collective {word!r}{nearest(word, KINDS)}; use {', '.join(KINDS)}"
            )
    return tuple(dict.fromkeys(words))


def parse_sizes(sizes: tuple[str, ...], **sweep: Any) -> tuple[int, ...]:
    """Returns the sizes given with `--bytes`, or else those of the sweep; an option not given is None.

    Raises:
        RequestError: a size is invalid, both were given, or the sweep is empty.
    """
    given = [on_command_line(name) for name, value in sweep.items() if value is not None]
    if sizes and given:
        raise RequestError(f"--bytes cannot be combined with {' and '.join(given)}; use one or the other")
    if sizes:
        return tuple(dict.fromkeys(_bytes("--bytes", text) for text in sizes))
    full = {name: _SWEEP[name] if value is None else value for name, value in sweep.items()}
    size, largest = (_bytes(f"--{name}-bytes", full[f"{name}_bytes"]) for name in ("min", "max"))
    if size > largest:
        raise RequestError(f"--min-bytes {size} must not exceed --max-bytes {largest}")
    swept = []
    while size <= largest:
        swept.append(size)
        size *= full["factor"]
    return tuple(swept)


def _bytes(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except RequestError as error:
        raise RequestError(f"{option} {error}") from None
