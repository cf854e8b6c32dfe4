"""Sums up what was recorded by name, such as kernels and operators, over the ranks of a run."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from ddp_hpc.base.text_table import Column, Row
from ddp_hpc.trace.analysis_results import Capture
from ddp_hpc.trace.kernel_kinds import KINDS
from ddp_hpc.trace.named_results import Kernel

ESTIMATES = (
    Column("tensor_cores", "Tensor or matrix cores", "{:.0%}".format),
    Column("occupancy", "est. occupancy", "{:.0f}%".format),
)
"""The columns of what kernels use of the device."""

LEAST_S = 5e-6
"""The least time that is not shown as 0.00 ms."""
_LEAST_SHARE, _MOST_OTHERS, _FEW = 0.001, 0.01, 25
_SUMMED = (
    "num_calls", "num_all", "total_s", "self_s", "device_s", "num_kernels", "comm_s", "idle_s", "bytes",
    "running_s",
)  # fmt: skip


def computes(kernel: Kernel) -> bool:
    """Returns whether it is neither a collective nor a copy."""
    return kernel.kind in KINDS and not kernel.is_copy


def computing_kernels(capture: Capture) -> list[Kernel]:
    """Returns the kernels of all ranks that compute."""
    return [kernel for trace in capture.ranks for kernel in trace.kernels if computes(kernel)]


def sums(capture: Capture, field: str, by: tuple[str, ...], order: str) -> list[Row]:
    """Returns the `kernels` or `ops` that agree in `by`, the mean of the ranks and steps, and the ranks
    with the least and the most.
    """
    groups: defaultdict[tuple[str, ...], list[tuple[int, Row]]] = defaultdict(list)
    for trace in capture.ranks:
        for item in getattr(trace, field):
            values = dict(vars(item))
            groups[tuple(values[name] for name in by)].append((trace.rank, values))
    rows = []
    for own in groups.values():
        of_rank: defaultdict[int, float] = defaultdict(float)
        for rank, values in own:
            of_rank[rank] += values[order]
        ordered = sorted((of_rank[trace.rank] / capture.num_steps, trace.rank) for trace in capture.ranks)
        edges = zip(("smallest", "largest"), (ordered[0], ordered[-1]), strict=True)
        summed = [name for name in _SUMMED if name in own[0][1]]
        num = len(capture.ranks) * capture.num_steps
        means: Row = {name: sum(values[name] for _, values in own) / num for name in summed}
        means |= {each.field: weighted([values for _, values in own], each.field) for each in ESTIMATES}
        for name, (value, rank) in edges:
            means |= {f"{name}_s": value, f"{name}_rank": rank if ordered[-1][0] >= LEAST_S else None}
        # What belongs together, such as the longest call and its time, is of one rank.
        rank, largest = max(own, key=lambda one: one[1].get("longest_s", 0.0))
        means["longest_rank"] = rank
        means["median_s"] = _median([values for _, values in own if values.get("samples_s")])
        means["shortest_s"] = min(values.get("shortest_s", 0.0) for _, values in own)
        rows.append(largest | means | {"num_all": sum(values["num_calls"] for _, values in own)})
    return sorted(rows, key=lambda row: -row[order])


def _median(rows: Sequence[Row]) -> float:
    """Returns the median duration of the calls, from samples."""
    samples = [(one, row["num_calls"] / len(row["samples_s"])) for row in rows for one in row["samples_s"]]
    left, middle = sum(row["num_calls"] for row in rows) / 2, list[float]()
    for sample_s, weight in sorted(samples):
        left -= weight
        if left < 1e-6:
            middle.append(sample_s)
        if left < -1e-6:
            break
    return statistics.fmean(middle or [0.0])


def with_others(capture: Capture, rows: list[Row], name: str) -> list[Row]:
    """Returns the rows with one instead of those of which all times are below 0.1 % of a step, or 0.00 ms. If
    there are few rows, these are at most 1 % of a step.
    """
    least_s = max(LEAST_S, _LEAST_SHARE * capture.mean.wall_s)
    summed = [one for one in _SUMMED if rows and one in rows[0]]
    longer, short = list[Row](), list[Row]()
    for row in rows:
        is_short = all(row[one] < least_s for one in summed if one.endswith("_s"))
        (short if is_short else longer).append(row)
    left_s, kept = sum(map(_longest_s, short)), {id(row) for row in longer}
    for row in sorted(short, key=_longest_s, reverse=True):
        is_little = left_s <= _MOST_OTHERS * capture.mean.wall_s or _longest_s(row) < LEAST_S
        if is_little or len(kept) >= _FEW:
            break
        left_s -= _longest_s(row)
        kept.add(id(row))
    longer, short = ([row for row in rows if (id(row) in kept) == of] for of in (True, False))
    if len(short) < 2:
        return rows
    others: Row = dict.fromkeys(rows[0]) | {one: sum(row[one] for row in short) for one in summed}
    return [*longer, others | {name: f"{len(short):,} others", "is_sum": True}]


def _longest_s(row: Row) -> float:
    return max((row[one] for one in _SUMMED if one.endswith("_s") and one in row), default=0.0)


def weighted(rows: Sequence[Row], name: str) -> float | None:
    """Returns the mean weighted by the time of the kernels; None if it is unknown for most of this time."""
    rows = [row for row in rows if not row.get("is_copy")]  # copies have no estimates
    known = [row for row in rows if row.get(name) is not None]
    known_s = sum(row["total_s"] for row in known)
    if not known_s or known_s < sum(row["total_s"] for row in rows) / 2:
        return None
    return sum(float(row[name]) * float(row["total_s"]) for row in known) / float(known_s)
