"""The output of `ddp-hpc bench comm`: the table, the sums of gradient buckets, JSON and a picture."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import click

from ddp_hpc.base import text_table as tables
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.text_table import Column, Row
from ddp_hpc.base.units import format_bytes
from ddp_hpc.bench import results_output as report
from ddp_hpc.bench.comm import baseline as comm_baseline
from ddp_hpc.bench.comm.parse_options import CommBench
from ddp_hpc.bench.results_output import format_us


def table(rows: Sequence[Row]) -> str:
    """Formats the rows as text. A GB has 1e9 bytes, as in nccl-tests."""
    columns = [
        Column("name", "collective"),
        Column("bytes", "size", format_bytes),
        Column("ranks", "ranks"),
        Column("ranks_per_node", "per node"),
        Column("iterations", "calls"),
        Column("median_us", "median us", format_us),
        Column("p99_us", "p99 us", format_us),
        Column("algbw_bytes_per_s", "algbw GB/s", _gb),
        Column("busbw_bytes_per_s", "busbw GB/s", _gb),
        Column("correct", "correct", lambda correct: "true" if correct else "FALSE"),
    ]
    return tables.table(columns, rows)


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3f}" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e9:.2g}"


def sums(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the total time and size of the buckets for each group of ranks."""
    groups: dict[tuple[int, int | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["ranks"], row["ranks_per_node"]), []).append(row)
    return [
        {
            "ranks": ranks,
            "ranks_per_node": per_node,
            "num_buckets": len(some),
            "bytes": sum(row["bytes"] for row in some),
            "step_us": sum(row["median_us"] for row in some),
        }
        for (ranks, per_node), some in groups.items()
    ]


def describe(sum_of_buckets: dict[str, Any], model: str) -> str:
    """Returns a line with the size of the gradients and the time to reduce them in one step."""
    found = sum_of_buckets
    num = found["num_buckets"]
    return (
        f"{model} on {found['ranks']} ranks: {format_bytes(found['bytes'])} of gradients in {num} "
        f"bucket{'s' * (num > 1)}; all_reduce takes {found['step_us'] / 1000:,.1f} ms per step "
        "if none of it overlaps with the backward pass"
    )


def panels(rows: Sequence[Row], of_model: bool) -> list[report.Panel | report.Curves]:
    """Returns a curve of bus bandwidth against message size for each collective, or bars with the times of
    the buckets of a model.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        each = "" if row["ranks_per_node"] is None else f", {row['ranks_per_node']} per node"
        groups.setdefault(f"{row['ranks']} ranks{each}", []).append(row)
    if of_model:
        return [
            report.Panel(
                title,
                [
                    (
                        f"{row['name']}, {format_bytes(row['bytes'])}",
                        row["median_us"],
                        format_us(row["median_us"]),
                    )
                    for row in some
                ],
            )
            for title, some in groups.items()
        ]
    found: list[report.Panel | report.Curves] = []
    for title, some in groups.items():
        points: dict[str, list[tuple[float, float]]] = {}
        for row in some:
            points.setdefault(row["name"], []).append((row["bytes"], row["busbw_bytes_per_s"] / 1e9))
        found.append(report.Curves(title, points, "bytes"))
    return found


def write(
    bench: CommBench,
    rows: list[Row],
    settings: dict[str, Any],
    transport: dict[str, Any],
    medians: dict[Hashable, float],
) -> str:
    """Writes the table, the JSON and the picture; returns the reasons for a failure, or an empty string."""
    if not rows:
        return (
            f"nothing was measured: {settings['backend']} supports none of the requested collectives; choose "
            "others with --collectives"
        )
    more: dict[str, Any] = {"machine": report.machine(), "settings": settings, "transport": transport}
    if bench.model:
        more |= {"model": bench.model["model"], "gradients": sums(rows)}
    result = report.document("comm", rows, **more)
    axis = "microseconds, median" if bench.model else "bus bandwidth, GB/s"
    lines = [describe(found, more["model"]) for found in more.get("gradients", [])]
    problems = []
    try:
        click.echo("\n".join([table(rows), *lines]))
    except OSError as error:
        problems.append(f"cannot write the table to stdout ({error.strerror})")
    try:
        report.write_files(result, bench.json_file, bench.picture, panels(rows, bool(bench.model)), axis)
    except DdpHpcError as error:
        problems.append(str(error))
    wrong = [row for row in rows if not row["correct"]]
    slower = comm_baseline.slower_rows(rows, medians, bench.tolerance)
    if wrong:
        problems.append(
            f"wrong results in {len(wrong)} of {len(rows)} rows (see above); do not trust training results "
            "from these nodes with this backend"
        )
    if slower:
        assert bench.baseline is not None
        problems.append(comm_baseline.describe(slower, bench.baseline, bench.tolerance))
    return "; ".join(problems)
