"""The page's charts in plotly's format: columns of the mean step and of each rank, in milliseconds."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from ddp_hpc.base.text_table import cut
from ddp_hpc.trace.analysis_results import PART_NAMES, PARTS, Capture, Times, present
from ddp_hpc.trace.kernel_kinds import KINDS
from ddp_hpc.trace.named_results import ANNOTATION, BLOCKING, CALL, OPERATOR, PYTHON

Figure: TypeAlias = dict[str, Any]
"""A plotly figure's `data` and `layout`, and its `height` in pixels; it is as wide as the page."""

# Okabe and Ito's palette, which color-blind readers can distinguish on white and on black.
COLORS = {
    "data": "#e69f00",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "optimizer": "#009e73",
    "snapshot": "#cc79a7",
    "other": "#a08c6c",
    "comm_exposed": "#d55e00",
    "comm_hidden": "#f0a37a",
    "memcpy": "#f0e442",
    "idle": "#a6a6a6",
}
# Tol's muted palette, for what kernels do, and colors for the host.
_KIND_COLORS = (
    "#4d8a2b #332288 #88ccee #aa4499 #999933 #ddcc77 #7f5fd0 #cc6677 #117733 #882255 #661100 #44aa99 #8c96a3 "
    "#c5ccd6 #9fb4c7 #b39ddb #e0245e"
)
_COLORED = (*KINDS[:-1], OPERATOR, ANNOTATION, PYTHON, CALL, BLOCKING)
COLORS |= dict(zip(_COLORED, _KIND_COLORS.split(), strict=True))
MAX_NAME = 160
"""Limit of the characters of names in the timeline."""
MANY_RANKS = 32
"""With more ranks, there are no gaps between their columns, and the chart can be zoomed."""


def milliseconds(seconds: float) -> float:
    """Converts to milliseconds rounded to a microsecond; non-finite values, which JSON lacks, become 0."""
    return round(seconds * 1e3, 3) if math.isfinite(seconds) else 0.0


def plain(text: str) -> str:
    """Escapes text for plotly's labels, in which `<b>` and `<a href=...>` are markup."""
    return html.escape(cut(text, 60))


def mean_steps(captures: Sequence[Capture]) -> Figure:
    """Returns a column per capture with the parts of its mean step."""
    names = [plain(f"{capture.name}: {milliseconds(capture.mean.wall_s):,.1f} ms") for capture in captures]
    numbers = range(len(captures))
    means = [capture.mean for capture in captures]
    columns = axis(tickvals=list(numbers), ticktext=names, fixedrange=True)
    return _columns(numbers, means, columns, captures[0].per_step)


def by_rank(capture: Capture) -> Figure:
    """Returns a column per rank with the parts of its mean step."""
    ranks = [trace.rank for trace in capture.ranks]
    is_fixed = len(ranks) <= MANY_RANKS
    columns = axis("rank", fixedrange=is_fixed, **_ticks(ranks))
    return _columns(ranks, capture.rank_means, columns, capture.per_step)


def _columns(numbers: Sequence[int], means: Sequence[Times], x_axis: Figure, per_step: str) -> Figure:
    """Returns a column with the parts of each mean step."""
    data = [
        {
            "type": "bar",
            "name": PART_NAMES[field],
            "x": list(numbers),
            "y": [milliseconds(getattr(mean, field)) for mean in means],
            "marker": {"color": COLORS[field.removesuffix("_s")], "line": {"width": 0}},
            "hovertemplate": f"%{{x}}, {PART_NAMES[field]}: %{{y:,.3~f}} ms<extra></extra>",
        }
        for field in present(means, PARTS)
    ]
    layout = base_layout() | {
        "barmode": "stack",
        # With hundreds of columns, little more than the gaps would be visible.
        "bargap": 0 if len(numbers) > MANY_RANKS else 0.25,
        "xaxis": x_axis,
        "yaxis": axis(f"ms{per_step}", fixedrange=True),
    }
    return {"data": data, "layout": layout, "height": 270}


def _ticks(ranks: Sequence[int]) -> Figure:
    return {"tickvals": list(ranks)} if len(ranks) <= 16 else {"nticks": 12}


def base_layout() -> dict[str, Any]:
    """Returns the layout common to all charts; the page's style sheet sets the colors of text and grid."""
    return {
        # Plotly draws a chart twice if its labels need more space than this.
        "margin": {"l": 66, "r": 12, "t": 16, "b": 56},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hovermode": "closest",
        "font": {"family": "system-ui, sans-serif", "size": 12},
        # The style sheet sets the colors of the buttons.
        "modebar": {"bgcolor": "rgba(0,0,0,0)"},
    }


def axis(title: str | None = None, **settings: Any) -> Figure:
    """Returns an axis without lines, and with space between bars, numbers and title."""
    return {
        "title": {"text": title, "standoff": 10},
        "automargin": True,
        "zeroline": False,
        "separatethousands": True,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "rgba(0,0,0,0)",
        **settings,
    }
