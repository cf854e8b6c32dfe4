"""The tables of a report in their order, which the text and the page share."""

from __future__ import annotations

from ddp_hpc.base.text_table import Table
from ddp_hpc.trace import kernel_tables, tables
from ddp_hpc.trace.analysis_results import Capture


def report_tables(capture: Capture) -> dict[str, list[Table]]:
    """Returns the tables by section of the report, without those that have no rows."""
    found = {
        "ranks": [tables.ranks(capture), tables.host_regions(capture), tables.memory(capture)],
        "steps": [tables.steps(capture), kernel_tables.regions(capture)],
        "waits": [
            tables.idle(capture),
            tables.host_waits(capture),
            tables.blocking_calls(capture),
            tables.gaps(capture),
            tables.critical_path(capture),
        ],
        "collectives": [tables.collectives(capture)],
        "top": [
            tables.regions(capture),
            tables.functions(capture),
            tables.host_threads(capture),
            kernel_tables.kinds(capture),
            kernel_tables.streams(capture),
            kernel_tables.copies(capture),
            kernel_tables.kernels(capture),
            kernel_tables.kernels_by_operator(capture),
            tables.operators(capture),
        ],
    }
    return {section: [table for table in own if table.rows] for section, own in found.items()}
