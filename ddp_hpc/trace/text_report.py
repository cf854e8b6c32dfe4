"""Formats the report as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_hpc.base.text_table import Table, printable, table
from ddp_hpc.base.units import counted
from ddp_hpc.trace import kernel_tables, tables
from ddp_hpc.trace.analysis_results import Capture
from ddp_hpc.trace.recorded import about

_MOST_RANKS = 8
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
        "\n".join(f"{what}: {value}" for what, value in about(capture)),
        _show(tables.mean_steps(captures)),
    ]
    if len(captures) == 1 and len(capture.ranks) > 1:
        blocks += [
            _show(tables.ranks(capture), _MOST_RANKS),
            _show(tables.host_regions(capture), _MOST_RANKS),
        ]
    blocks += [
        _show(tables.steps(capture)),
        _show(tables.idle([each.name for each in captures], [each.mean for each in captures])),
        _show(tables.host_waits(capture), _MOST_WAITS),
        _show(tables.blocking_calls(capture), _MOST_WAITS),
        _show(tables.gaps(capture)),
        _show(tables.critical_path(capture)),
        _show(tables.collectives(capture)),
        _show(tables.regions(capture)),
        _show(kernel_tables.kinds(capture)),
        _show(kernel_tables.streams(capture)),
        _show(kernel_tables.copies(capture)),
        _show(kernel_tables.kernels(capture)),
        _show(tables.operators(capture)),
        _show(tables.memory(capture), _MOST_RANKS),
        *map(_notes, captures),
    ]
    return "\n\n".join("\n".join(map(printable, block.splitlines())) for block in blocks if block) + "\n"


def _show(shown: Table, most_rows: int = _MOST_ROWS) -> str:
    return table(shown.columns, shown.rows[:most_rows]) if shown.rows else ""


def _notes(capture: Capture) -> str:
    if not capture.notes:
        return ""
    lines = [f"notes on {capture.name}:", *(f"  {note}" for note in capture.notes[:_MOST_NOTES])]
    num_left = len(capture.notes) - _MOST_NOTES
    return "\n".join(lines + ([f"  and {num_left} more (see --json)"] if num_left > 0 else []))
