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
short = partial(shortened, limit=_NAME_LENGTH)


def kernel_name(capture: Capture) -> Callable[[str], str]:
    """Returns a format that shows different kernels of the capture differently."""
    names = {kernel.name for trace in capture.ranks for kernel in trace.kernels}
    distinct = distinguished(sorted(names), _NAME_LENGTH)
    return lambda name: distinct.get(name) or short(name)


def ms(seconds: float) -> str:
    """Formats a time in milliseconds."""
    return f"{seconds * 1e3:.2f}"


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
