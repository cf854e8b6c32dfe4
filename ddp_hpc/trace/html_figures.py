"""The page's charts in plotly's format: bars of the mean step and of each rank, in milliseconds."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from ddp_hpc.base.text_table import cut
from ddp_hpc.trace.analysis_results import PARTS, Capture, Times, present

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
_DARK = ("backward_s", "optimizer_s", "comm_exposed_s")
_LABELS = {"comm_exposed_s": "communication, exposed", "comm_hidden_s": "communication, hidden"}
_COMM = ("comm_exposed_s", "comm_hidden_s")
_BAR_PX = 84
_RANK_PX = 64
_FEW_RANKS = 8
MANY_RANKS = 32
"""With more ranks, there are no gaps between their columns, and the chart can be zoomed."""


def label_of(field: str) -> str:
    """Returns the label of a field such as `data_s`."""
    return _LABELS.get(field, _part(field))


def _part(field: str) -> str:
    return field.removesuffix("_s")


def milliseconds(seconds: float) -> float:
    """Converts to milliseconds rounded to a microsecond; non-finite values, which JSON lacks, become 0."""
    return round(seconds * 1e3, 3) if math.isfinite(seconds) else 0.0


def plain(text: str) -> str:
    """Escapes text for plotly's labels, in which `<b>` and `<a href=...>` are markup."""
    return html.escape(cut(text, 60))


def mean_steps(captures: Sequence[Capture]) -> Figure:
    """Returns a bar per capture with the parts of its mean step, above a thin bar of its communication."""
    names = [f"{capture.name}: {milliseconds(capture.mean.wall_s):,.1f} ms" for capture in captures]
    return _rows(names, [capture.mean for capture in captures], _BAR_PX)


def _rows(names: Sequence[str], means: Sequence[Times], row_px: int) -> Figure:
    """Returns a bar per mean step with its name above and a thin bar of its communication below."""
    rows = [2.0 * number for number in range(len(means))]
    data = [
        _bars(field, means, at, width)
        for fields, width, at in ((PARTS, 0.8, rows), (_COMM, 0.25, [row + 0.6 for row in rows]))
        for field in present(means, fields)
    ]
    labels = [
        {
            "text": plain(name),
            "x": 0, "y": row - 0.45, "xanchor": "left", "yanchor": "bottom", "showarrow": False,
        }
        for name, row in zip(names, rows, strict=True)
    ]  # fmt: skip
    layout = base_layout() | {
        "barmode": "stack",
        "annotations": labels,
        "uniformtext": {"minsize": 10, "mode": "hide"},
        "xaxis": axis("milliseconds", rangemode="tozero", fixedrange=True),
        "yaxis": axis(visible=False, fixedrange=True, range=[rows[-1] + 0.9, -1.0]),
    }
    return {"data": data, "layout": layout, "height": row_px * len(means) + 60}


def _bars(field: str, times: Sequence[Times], rows: Sequence[float], width: float) -> Figure:
    shares = [_percent(getattr(one, field), one.wall_s) for one in times]
    name = _part(field).replace("comm_exposed", "communication")
    return {
        "type": "bar",
        "orientation": "h",
        "name": label_of(field),
        "x": [milliseconds(getattr(one, field)) for one in times],
        "y": list(rows),
        "width": width,
        "marker": {"color": COLORS[_part(field)], "line": {"width": 0}},
        "customdata": shares,
        "hovertemplate": f"{label_of(field)}: %{{x:,.3~f}} ms, %{{customdata}}<extra></extra>",
        "text": [f"{name} {share}" for share in shares] if width > 0.5 else None,
        "textposition": "inside",
        "insidetextanchor": "middle",
        "insidetextfont": {"color": "#fff" if field in _DARK else "#111"},
        "textangle": 0,
    }


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else "-"


def by_rank(capture: Capture) -> Figure:
    """Returns the parts of each rank's mean step: bars for a few ranks, else columns."""
    if len(capture.ranks) <= _FEW_RANKS:
        names = [
            f"rank {trace.rank}: {milliseconds(mean.wall_s):,.1f} ms"
            for trace, mean in zip(capture.ranks, capture.rank_means, strict=True)
        ]
        return _rows(names, capture.rank_means, _RANK_PX)
    return _columns(capture)


def _columns(capture: Capture) -> Figure:
    """Returns, for each rank, a column with the parts of its mean step, and below it a column with its
    communication.
    """
    ranks = [trace.rank for trace in capture.ranks]
    is_wide = len(ranks) > MANY_RANKS
    has_comm = any(getattr(one, field) for one in capture.rank_means for field in _COMM)
    data = [
        {
            "type": "bar",
            "name": label_of(field),
            "x": ranks,
            "y": [milliseconds(getattr(one, field)) for one in capture.rank_means],
            "yaxis": y_axis,
            "marker": {"color": COLORS[_part(field)], "line": {"width": 0}},
            "hovertemplate": f"rank %{{x}}, {label_of(field)}: %{{y:,.3~f}} ms<extra></extra>",
        }
        for fields, y_axis in ((PARTS, "y"), (_COMM, "y2"))
        for field in present(capture.rank_means, fields)
    ]
    layout = base_layout() | {
        "barmode": "stack",
        # With hundreds of columns, little more than the gaps would be visible.
        "bargap": 0 if is_wide else 0.25,
        "xaxis": axis("rank", anchor="y2" if has_comm else "y", fixedrange=not is_wide, **_ticks(ranks)),
        "yaxis": axis("ms per step", domain=[0.36 if has_comm else 0, 1], fixedrange=True),
        "yaxis2": axis("comm., ms", domain=[0, 0.26], fixedrange=True),
    }
    return {"data": data, "layout": layout, "height": 380 if has_comm else 270}


def _ticks(ranks: Sequence[int]) -> Figure:
    return {"tickvals": list(ranks)} if len(ranks) <= 16 else {"nticks": 12}


def base_layout() -> dict[str, Any]:
    """Returns the layout common to all charts; the page's style sheet sets the colors of text and grid."""
    return {
        "margin": {"l": 12, "r": 12, "t": 12, "b": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hovermode": "closest",
        "font": {"family": "system-ui, sans-serif", "size": 12},
        # The style sheet sets the colors of the buttons.
        "modebar": {"bgcolor": "rgba(0,0,0,0)"},
    }


def axis(title: str | None = None, **more: Any) -> Figure:
    """Returns an axis without lines, and with space between bars, numbers and title."""
    return {
        "title": {"text": title, "standoff": 10},
        "automargin": True,
        "zeroline": False,
        "separatethousands": True,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "rgba(0,0,0,0)",
        **more,
    }
