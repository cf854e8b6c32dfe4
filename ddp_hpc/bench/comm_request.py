"""What `ddp-hpc bench comm` is asked for: checked before anything is started. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from data_gen.recipe import parse_shape
from ddp_hpc.errors import RequestError, nearest
from ddp_hpc.training.config import parse_option
from ddp_hpc.units import parse_bytes

_SWEEP: dict[str, Any] = {"min_bytes": "1KiB", "max_bytes": "64MiB", "factor": 4}
_LEAST_ITERATIONS = 5
_OF_SIZES = ("bytes", "min_bytes", "max_bytes", "factor")
_OF_MODEL = ("model_options", "data", "src_shape", "tgt_shape", "bucket_mib")
KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
_SPLIT = ("all_gather", "reduce_scatter", "all_to_all")
"""Their elements are divided among the ranks: they are a multiple of their number."""


def num_elements(kind: str, num_bytes: int, itemsize: int, num_ranks: int) -> int:
    """Elements in all for about so many bytes: rounded down, as nccl-tests does, but not to nothing.

    Sizes are those of nccl-tests (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md and
    src/sendrecv.cu): the whole that one rank holds, its input, or its output where that is larger.
    """
    share = num_ranks if kind in _SPLIT else 1
    return max(num_bytes // itemsize // share, 1) * share


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured for one row."""

    warmup: int = 5
    iterations: int = 100
    seconds: float = 2.0
    """Fewer iterations where they would take longer, but not fewer than 5."""

    def num_iterations(self, taken_s: float) -> int:
        """Iterations where one takes so long; it is known after a warm-up alone."""
        affordable = self.seconds / taken_s if taken_s > 0 else inf
        return min(self.iterations, max(_LEAST_ITERATIONS, int(min(affordable, self.iterations))))


@dataclass(frozen=True, kw_only=True)
class CommBench:
    """The options of `ddp-hpc bench comm`, which documents each."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]  # in bytes
    dtype: str
    ranks_per_node: tuple[int | None, ...]  # None: all
    effort: Effort
    model: dict[str, Any] = field(default_factory=dict)  # options of a TrainConfig; empty: no model's buckets
    bucket_mib: float | None = None
    baseline: Path | None = None
    tolerance: float = 0.2
    json_file: Path | None = None
    picture: Path | None = None


def parse(**options: Any) -> CommBench:
    """What was typed: None, or nothing, for an option that was not.

    Raises:
        RequestError: for what makes no sense.
    """
    model = options.pop("buckets_of")
    sweep = {name: options.pop(name) for name in _OF_SIZES}
    of_model = {name: options.pop(name) for name in _OF_MODEL}
    named = options.pop("collectives")
    if model is None and (typed := [name for name, value in of_model.items() if value not in (None, ())]):
        raise RequestError(f"{_spelled(typed)} goes with --buckets-of: name a model, or leave it out")
    if model is not None:
        typed = [name for name, value in {**sweep, "collectives": named}.items() if value not in (None, ())]
        if typed:
            raise RequestError(
                f"--buckets-of {model} measures all_reduce of the model's sizes: leave {_spelled(typed)} out"
            )
    for name in ("tolerance", "seconds"):
        if not 0 <= options[name] < inf:
            raise RequestError(f"--{name} {options[name]}: has to be 0 or more, and finite")
    bucket_mib = of_model.pop("bucket_mib")
    if bucket_mib is not None and not 0 < bucket_mib < inf:
        raise RequestError(f"--bucket-mib {bucket_mib}: has to be above 0, and finite")
    texts = {name: of_model.pop(name) for name in ("src_shape", "tgt_shape")}
    shapes = {name: parse_shape(text) for name, text in texts.items() if text is not None}
    model_options = tuple(map(parse_option, of_model["model_options"]))
    effort = Effort(**{name: options.pop(name) for name in ("warmup", "iterations", "seconds")})
    return CommBench(
        collectives=parse_collectives(named),
        sizes=parse_sizes(sweep.pop("bytes"), **sweep),
        ranks_per_node=parse_ranks_per_node(options.pop("ranks_per_node")),
        effort=effort,
        model={}
        if model is None
        else {"model": model, "model_options": model_options, "data": of_model["data"], **shapes},
        bucket_mib=bucket_mib,
        **options,
    )


def _spelled(names: list[str]) -> str:
    options = {"model_options": "--model-option"}
    return " and ".join(options.get(name, f"--{name.replace('_', '-')}") for name in names)


def parse_collectives(text: str | None) -> tuple[str, ...]:
    """`all_reduce,send_recv` as names, each once; None for all.

    Raises:
        RequestError: one of them is unknown.
    """
    if text is None:
        return KINDS
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in KINDS:
            raise RequestError(
                f"--collectives {word!r}: unknown{nearest(word, KINDS)}; one of {', '.join(KINDS)}"
            )
    return tuple(dict.fromkeys(words))


def parse_sizes(sizes: tuple[str, ...], **sweep: Any) -> tuple[int, ...]:
    """The bytes of each `--bytes`, else of a sweep; an option that was not typed is None.

    Raises:
        RequestError: one is no size, both ways were typed, or the sweep has no size in it.
    """
    typed = [f"--{name.replace('_', '-')}" for name, value in sweep.items() if value is not None]
    if sizes and typed:
        raise RequestError(f"--bytes names the sizes one by one: leave {' and '.join(typed)} out")
    if sizes:
        return tuple(dict.fromkeys(_bytes("--bytes", text) for text in sizes))
    asked = {name: _SWEEP[name] if value is None else value for name, value in sweep.items()}
    size, largest = (_bytes(f"--{name}-bytes", asked[f"{name}_bytes"]) for name in ("min", "max"))
    if size > largest:
        raise RequestError(f"--min-bytes {size} is more than --max-bytes {largest}: there is no size between")
    found = []
    while size <= largest:
        found.append(size)
        size *= asked["factor"]
    return tuple(found)


def _bytes(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except RequestError as error:
        raise RequestError(f"{option} {error}") from None


def parse_ranks_per_node(text: str) -> tuple[int | None, ...]:
    """`1,all` as numbers, None for all.

    Raises:
        RequestError: a word is neither `all` nor a number above 0.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word != "all" and not (word.isascii() and word.isdigit() and int(word[:9]) > 0):
            raise RequestError(
                f"--ranks-per-node {text}: numbers above 0 and `all` are needed, with commas between them, "
                "such as 1,all"
            )
    return tuple(dict.fromkeys(None if word == "all" else int(word[:9]) for word in words))
