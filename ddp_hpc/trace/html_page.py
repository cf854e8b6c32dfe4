"""Renders the report on traces as a self-contained HTML page: `ddp-hpc report TRACE_DIR -o report.html`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_hpc.trace import tables
from ddp_hpc.trace.analysis_results import PART_NAMES, PARTS, Capture, present
from ddp_hpc.trace.html_document import document
from ddp_hpc.trace.html_figures import COLORS, MANY_RANKS, Figure, by_rank, mean_steps
from ddp_hpc.trace.html_timeline import MAX_BARS, timeline
from ddp_hpc.trace.recorded import about, details
from ddp_hpc.trace.report_tables import report_tables

_MAX_ROWS, _MAX_FOUND_ROWS = 25, 200


def page(captures: Sequence[Capture], sentences: Sequence[str]) -> str:
    """Returns an HTML document of about 5 MB, nearly all of which is plotly's script.

    `captures[0]` is the main capture and is compared with the others; `sentences` describe the changes and
    are shown at the top. The text can be encoded as UTF-8.

    Raises:
        RequestError: plotly is not installed.
    """
    # The only column of one rank would show nothing that the table does not.
    several = len(captures) > 1 or len(captures[0].ranks) > 1
    figures: dict[str, Figure] = {"mean": mean_steps(captures)} if several else {}
    sections = [_section(number, capture, len(captures), figures) for number, capture in enumerate(captures)]
    return document(
        "traces.html.j2", figures, captures=captures, sections=sections, sentences=sentences,
        mean_table=tables.mean_steps(captures), legend=_legend(captures), many_ranks=MANY_RANKS,
        max_rows=_MAX_ROWS, max_found_rows=_MAX_FOUND_ROWS,
        warnings=[warning for capture in captures for warning in capture.warnings],
    )  # fmt: skip


def _section(number: int, capture: Capture, num_captures: int, figures: dict[str, Figure]) -> dict[str, Any]:
    """Returns the template's variables for a capture, and adds its charts to `figures`."""
    lines = timeline(capture, MAX_BARS // num_captures)
    if len(capture.ranks) > 1:
        figures[f"ranks{number}"] = by_rank(capture)
    figures[f"timeline{number}"] = lines.figure
    return {
        "number": number,
        "capture": capture,
        "about": about(capture),
        "details": details(capture),
        "timeline": lines,
        "tables": report_tables(capture),
    }


def _legend(captures: Sequence[Capture]) -> list[tuple[str, str]]:
    shown = present([mean for capture in captures for mean in capture.rank_means], PARTS)
    return [(PART_NAMES[field], COLORS[field.removesuffix("_s")]) for field in shown]
