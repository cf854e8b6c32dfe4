"""The output of `ddp-hpc bench comm`: the table and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ddp_hpc.base import text_table as tables
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.text_table import Column, Row
from ddp_hpc.base.units import format_bytes
from ddp_hpc.bench import results_output
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


def write(bench: CommBench, rows: list[Row], settings: dict[str, Any], transport: dict[str, Any]) -> str:
    """Writes the table and the JSON; returns the reasons for a failure, or an empty string."""
    if not rows:
        return (
            f"nothing was measured: {settings['backend']} supports none of the requested collectives; choose "
            "others with --collectives"
        )
    problems = []
    try:
        click.echo(table(rows))
    except OSError as error:
        problems.append(f"cannot write the table to stdout ({error.strerror})")
    document = results_output.document("comm", rows, settings=settings, transport=transport)
    try:
        results_output.save(document, bench.json_file)
    except DdpHpcError as error:
        problems.append(str(error))
    wrong = [row for row in rows if not row["correct"]]
    if wrong:
        problems.append(
            f"wrong results in {len(wrong)} of {len(rows)} rows (see above); do not trust training results "
            "from these nodes with this backend"
        )
    return "; ".join(problems)
