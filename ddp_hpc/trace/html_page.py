"""Renders the report on traces as a self-contained HTML page: `ddp-hpc report TRACE_DIR -o report.html`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_hpc.base.text_table import Table
from ddp_hpc.trace import kernel_tables, tables
from ddp_hpc.trace.analysis_results import COLUMNS, PART_NAMES, Capture, present
from ddp_hpc.trace.html_document import document
from ddp_hpc.trace.html_figures import COLORS, MANY_RANKS, Figure, by_rank, mean_steps
from ddp_hpc.trace.html_timeline import MAX_BARS, timeline
from ddp_hpc.trace.recorded import about

_MAX_ROWS, _MAX_FOUND_ROWS = 25, 200


def page(captures: Sequence[Capture], sentences: Sequence[str]) -> str:
    """Returns an HTML document of about 5 MB, nearly all of which is plotly's script.

    `captures[0]` is the main capture and is compared with the others; `sentences` describe the changes and
    are shown at the top. The text can be encoded as UTF-8.

    Raises:
        RequestError: plotly is not installed.
    """
    figures: dict[str, Figure] = {"mean": mean_steps(captures)}
    sections = [_section(number, capture, len(captures), figures) for number, capture in enumerate(captures)]
    return document(
        "traces.html.j2", figures, captures=captures, sections=sections, sentences=sentences,
        mean_table=tables.mean_steps(captures), legend=_legend(captures), many_ranks=MANY_RANKS,
        max_rows=_MAX_ROWS, max_found_rows=_MAX_FOUND_ROWS,
        warnings=[warning for capture in captures for warning in capture.warnings],
    )  # fmt: skip


def _section(number: int, capture: Capture, num_captures: int, figures: dict[str, Figure]) -> dict[str, Any]:
    """Returns the template's variables for a capture, and adds its charts to `figures`."""
    lines, kinds = timeline(capture, MAX_BARS // num_captures), kernel_tables.kinds(capture)
    if len(capture.ranks) > 1:
        figures[f"ranks{number}"] = by_rank(capture)
    figures[f"timeline{number}"] = lines.figure
    ranks = [f"rank {trace.rank}" for trace in capture.ranks]
    return {
        "number": number,
        "capture": capture,
        "about": about(capture),
        "timeline": lines,
        "ranks": _without_empty(
            *([tables.ranks(capture)] if len(capture.ranks) > 1 else []),
            tables.host_regions(capture),
            tables.memory(capture),
        ),
        "steps": tables.steps(capture),
        "has_communication": any(mean.comm_exposed_s or mean.comm_hidden_s for mean in capture.rank_means),
        "waits": _without_empty(
            tables.idle(ranks, capture.rank_means),
            tables.host_waits(capture),
            tables.blocking_calls(capture),
            tables.gaps(capture),
            tables.critical_path(capture),
        ),
        "collectives": tables.collectives(capture),
        "has_estimates": any(row["tensor_cores"] is not None for row in kinds.rows),
        "top": _without_empty(
            tables.regions(capture),
            kinds,
            kernel_tables.streams(capture),
            kernel_tables.copies(capture),
            kernel_tables.kernels(capture),
            kernel_tables.kernels_by_operator(capture),
            tables.operators(capture),
        ),
    }


def _without_empty(*shown: Table) -> list[Table]:
    return [table for table in shown if table.rows]


def _legend(captures: Sequence[Capture]) -> list[tuple[str, str]]:
    shown = present([mean for capture in captures for mean in capture.rank_means], COLUMNS)
    return [(PART_NAMES[field], COLORS[field.removesuffix("_s")]) for field in shown]
