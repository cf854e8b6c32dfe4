"""Options of the outputs of a training: metrics, traces, progress and summary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.options import DIRECTORY, check_values, option, show_numbers


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
    return "all" if ranks is None else show_numbers(sorted(ranks))


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """The options that select the outputs of a training and their files.

    Raises:
        RequestError: a value is out of range.
    """

    metrics: Path | None = option(
        None, "Write the metrics of each step to this file, one JSON object per line (rank 0 only)."
    )
    metrics_hook: str | None = option(
        None,
        "Function that rank 0 calls with the metrics of each step, for TensorBoard and other trackers.",
        metavar="MODULE:FUNCTION",
    )
    trace_dir: Path | None = option(
        None,
        "Record some steps with torch.profiler, and write a Chrome trace and a table for each rank to this "
        "directory.",
        **DIRECTORY,
    )
    trace_window: tuple[int, ...] = option(
        (1, 1, 2, 1),
        "Profiler schedule: number of steps to skip, steps to warm up, steps to record, and repetitions.",
        read=read_numbers,
        show=show_numbers,
        metavar="WAIT,WARMUP,ACTIVE,REPEAT",
    )
    trace_ranks: frozenset[int] | None = option(
        None,
        "Ranks that record traces: all, or a comma-separated list of ranks.",
        read=_read_ranks,
        show=_show_ranks,
        metavar="all|0|0,7",
        shown_default="all",
    )
    trace_stacks: bool = option(
        False, "Also record Python stacks in traces, which slows down the recorded steps."
    )
    trace_flops: bool = option(
        False, "Also record estimates of the FLOPs of matrix products and convolutions in traces."
    )
    summary: Path | None = option(
        None, "At the end of the training, write a summary to this file as one JSON object (rank 0 only)."
    )
    log_every: int | None = option(
        None,
        "Number of steps between two progress lines in the log.",
        above=0,
        metavar="N",
        shown_default="one line per second",
    )

    def __post_init__(self) -> None:
        check_values(self)
        if len(self.trace_window) != 4 or min(self.trace_window[:2]) < 0 or min(self.trace_window[2:]) < 1:
            raise RequestError(
                f"--trace-window {show_numbers(self.trace_window)}: expected four numbers: steps to skip "
                "and to warm up (0 or more), steps to record and repetitions (1 or more), such as 1,1,2,1"
            )
