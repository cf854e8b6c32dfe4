"""The options of the outputs of a training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.errors import RequestError
from ddp_hpc.options import check_ranges, option, read_directory


def read_numbers(flag: str, text: str) -> tuple[int, ...]:
    """Parses numbers such as `1,1,2,1`.

    Raises:
        RequestError: an entry is not a whole number.
    """
    if not all(word.strip().isascii() and word.strip().isdigit() for word in text.split(",")):
        raise RequestError(f"{flag} {text}: expected whole numbers separated by commas, such as 0,7")
    return tuple(int(word[:18]) for word in text.split(","))


def _read_ranks(flag: str, text: str) -> frozenset[int] | None:
    return None if text == "all" else frozenset(read_numbers(flag, text))


def _show_ranks(ranks: frozenset[int] | None) -> str:
    return "all" if ranks is None else ",".join(map(str, sorted(ranks)))


def _show_numbers(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """The options that select the outputs of a training and their files.

    Raises:
        RequestError: a value is out of range.
    """

    metrics: Path | None = option(None, "Write one JSON line per step to this file, on rank 0.")
    tensorboard: Path | None = option(
        None, "Write TensorBoard's event files to this directory, on rank 0.", metavar="DIR"
    )
    metrics_hook: str | None = option(
        None,
        "Your own function, which rank 0 calls with the metrics of each step, for other trackers.",
        metavar="MODULE:FUNCTION",
    )
    trace_dir: Path | None = option(
        None,
        "Record some steps with torch.profiler: a Chrome trace and a table per rank, in this directory.",
        read=read_directory,
        show=str,
        metavar="DIR",
    )
    trace_window: tuple[int, ...] = option(
        (1, 1, 2, 1),
        "Steps to skip, steps to warm the profiler up, steps to record, and number of repetitions.",
        read=read_numbers,
        show=_show_numbers,
        metavar="WAIT,WARMUP,ACTIVE,REPEAT",
    )
    trace_ranks: frozenset[int] | None = option(
        None,
        "Ranks that record: all, or numbers.",
        read=_read_ranks,
        show=_show_ranks,
        metavar="all|0|0,7",
        shown_default="all",
    )
    trace_stacks: bool = option(False, "Record Python stacks too, which slows the recorded steps down.")
    trace_flops: bool = option(False, "Estimate the FLOPs of matrix products and convolutions too.")
    trace_max_mib: float = option(
        1024.0,
        "Discard the trace of a rank if it is larger than this; its table is kept.",
        above=0,
        metavar="MIB",
    )
    summary: Path | None = option(None, "Write one JSON object to this file at the end, on rank 0.")
    log_every: int = option(10, "Steps between two lines of progress.", above=0)

    def __post_init__(self) -> None:
        check_ranges(self)
        if len(self.trace_window) != 4 or min(self.trace_window[:2]) < 0 or min(self.trace_window[2:]) < 1:
            raise RequestError(
                f"--trace-window {_show_numbers(self.trace_window)}: expected four numbers: steps to skip "
                "and to warm up (0 or more), steps to record and repetitions (1 or more), such as 1,1,2,1"
            )
