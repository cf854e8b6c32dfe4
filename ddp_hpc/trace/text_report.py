"""Formats the report as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_hpc.base.text_table import Table, printable, table
from ddp_hpc.base.units import counted
from ddp_hpc.trace import tables
from ddp_hpc.trace.analysis_results import Capture
from ddp_hpc.trace.recorded import about, details
from ddp_hpc.trace.report_tables import report_tables

_MOST_ROWS, _MOST_WAITS = 10, 5
_MOST_NOTES = 20


def text(captures: Sequence[Capture], sentences: Sequence[str]) -> str:
    """Formats the first capture in full and the mean steps of the others; `sentences` describe changes."""
    capture = captures[0]
    warnings = [warning for each in captures for warning in each.warnings]
    blocks = [
        f"{capture.name}: {len(capture.ranks)} of {counted(capture.world_size, 'rank')}",
        "\n".join(warnings),
        "\n".join((*sentences, *capture.findings)),
        "\n".join(f"{what}: {value}" for what, value in about(capture) + details(capture)),
        _show(tables.mean_steps(captures), _MOST_ROWS),
    ]
    for section, shown in report_tables(capture).items():
        blocks += [_show(each, _MOST_WAITS if section == "waits" else _MOST_ROWS) for each in shown]
    blocks += map(_notes, captures)
    return "\n\n".join("\n".join(map(printable, block.splitlines())) for block in blocks if block) + "\n"


def _show(shown: Table, most_rows: int) -> str:
    return table(shown.columns, shown.rows[:most_rows])


def _notes(capture: Capture) -> str:
    if not capture.notes:
        return ""
    lines = [f"notes on {capture.name}:", *(f"  {note}" for note in capture.notes[:_MOST_NOTES])]
    num_left = len(capture.notes) - _MOST_NOTES
    return "\n".join(lines + ([f"  and {num_left} more (see --json)"] if num_left > 0 else []))
