"""The formats of the columns of a report's tables, and the columns of sums over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ddp_hpc.base.text_table import Column
from ddp_hpc.trace.analysis_results import Capture
from ddp_hpc.trace.event_names import distinguished, shortened

_NAME_LENGTH = 64
short, long = partial(shortened, limit=_NAME_LENGTH), partial(shortened, limit=96)
HINTS = {
    "late launch": "The device had finished everything, and the next kernel was not being launched yet.",
    "launch call": "The call that launches the next kernel had begun.",
    "kernel queued": "The call had returned, but the next kernel had not started.",
    "in step": "'-' is before the first step, to which the time is then relative.",
    "longest us": "Of the calls in the steps; a search in the timeline finds others, too.",
    "which begins at": "Counted from the start of the step on the rank that begins it first.",
    "it is the": "The first step is not compared with the others if it begins at another moment.",
    "waits of the host": "Calls that can wait for the device or the driver, and long times without a call.",
    "inside": "The outermost operator and the innermost annotation around the wait.",
    "device idle ms": "The time in which the device has nothing to do, for waits also right after them.",
    "comm exposed": "The time in which a collective runs and nothing is computed.",
    "comm hidden": "The time in which a collective runs beside computation; not part of the sum.",
    "modules": "Those of this class that are called at the same depth.",
    "longest module": "The one that takes longest on the host; the numbers are those of all of its class.",
    "exposed ms": "The time in which nothing is computed.",
    "median ms": "Half of the calls are shorter; of collectives, with the time of waiting for late ranks.",
    "median us": "About half of the calls are shorter, over all ranks and steps.",
    "median transfer ms": "From the start on the last rank to the end; unknown (-) without the other ranks.",
    "busbw GB/s": "The bus bandwidth of the transfer, as defined by nccl-tests.",
    "Tensor or matrix cores": "The share of the time of kernels whose names show it; '-' if names do not.",
    "est. occupancy": "Kineto's estimate of the achieved occupancy, averaged over the time of the kernels.",
    "grid, block": "The blocks, and the threads of a block, in each dimension in the longest call.",
    "launched by": "The innermost operator or annotation around the launch of the longest call.",
    "TFLOP/s": "Of matrix products: 2 operations for each multiplication, computed from the shapes.",
    "least GB/s": "Inputs and output, once each, of elementwise operators, copies and softmax, by the time.",
    "GB/s": "The size of the copies by their time.",
    "beside kernels": "The share of the time of the copies in which kernels run.",
}
"""What columns contain, by their titles, as far as the titles do not say it."""


def kernel_name(capture: Capture) -> Callable[[str], str]:
    """Returns a format that shows different kernels of the capture differently."""
    names = {kernel.name for trace in capture.ranks for kernel in trace.kernels}
    distinct = distinguished(sorted(names), _NAME_LENGTH)
    return lambda name: distinct.get(name) or short(name)


def ms(seconds: float) -> str:
    """Formats a time in milliseconds."""
    return f"{seconds * 1e3:.2f}"


def us(seconds: float) -> str:
    """Formats a time in microseconds."""
    return f"{seconds * 1e6:,.1f}"


def count(number: float) -> str:
    """Formats a mean number, without a decimal if it is an integer."""
    return f"{number:,.1f}".removesuffix(".0")


def known(write: Callable[[Any], str]) -> Callable[[Any], str]:
    """Returns a format that shows zero, which means unknown, as a dash."""
    return lambda value: write(value) if value else "-"


def sum_columns(capture: Capture, first: Column, unit: str) -> list[Column]:
    """Returns the columns of `sums`."""
    of = " and ".join(["rank"] * (len(capture.ranks) > 1) + ["step"] * capture.has_steps)
    columns = [replace(first, title=f"{first.title} per {of}" if of else first.title.rstrip(","))]
    columns += [Column("num_calls", "calls", count), Column("total_s", "total ms", ms)]
    if len(capture.ranks) == 1:
        return columns
    return [*columns, Column("largest_s", f"most {unit} on a rank", ms), Column("largest_rank", "rank")]
