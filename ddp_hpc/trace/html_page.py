"""Renders the report as a self-contained HTML page: `ddp-hpc report -o report.html`.

Names in traces can contain anything, so they are escaped in the template and in plotly's labels. The
Content-Security-Policy of the page allows only its own two scripts, and no loading of other resources.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.pip_extras import install_command
from ddp_hpc.base.text_table import cut
from ddp_hpc.base.units import duration
from ddp_hpc.trace import tables
from ddp_hpc.trace.analysis_results import COLUMNS, Capture, present
from ddp_hpc.trace.html_figures import COLORS, MANY_RANKS, Figure, by_rank, label_of, mean_steps
from ddp_hpc.trace.html_timeline import MAX_SPANS, timeline

_HTML_DIRECTORY = Path(__file__).parent / "html"
_MAX_NAMED = 8
_MAX_NAME = 80
_MAX_SENTENCES = 100
_MAX_SENTENCE = 500
_MAX_ROWS = 25


def page(captures: Sequence[Capture], sentences: Sequence[str]) -> str:
    """Returns an HTML document of about 5 MB, nearly all of which is plotly's script.

    `captures[0]` is the main capture and is compared with the others; `sentences` describe the changes and
    are shown at the top. The text can be encoded as UTF-8.

    Raises:
        RequestError: plotly is not installed.
    """
    plotly = _plotly()
    script = (_HTML_DIRECTORY / "report.js").read_text(encoding="utf-8")
    figures: dict[str, Figure] = {"mean": mean_steps(captures)}
    sections = [_section(number, capture, len(captures), figures) for number, capture in enumerate(captures)]
    text = _environment().get_template("report.html.j2").render(
        captures=captures, sections=sections, sentences=sentences, mean_table=tables.mean_steps(captures),
        figures=figures, legend=_legend(captures), many_ranks=MANY_RANKS, max_rows=_MAX_ROWS,
        warnings=[warning for capture in captures for warning in capture.warnings],
        style=Markup((_HTML_DIRECTORY / "report.css").read_text(encoding="utf-8")),  # noqa: S704
        plotly=Markup(plotly), script=Markup(script),  # noqa: S704
        script_hashes=[_hash(plotly), _hash(script)],
    )  # fmt: skip
    # JSON can contain unpaired surrogates, which cannot be encoded as UTF-8.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise RequestError(
            f"the HTML page requires plotly, which is not installed; run {install_command('report')}"
        ) from error
    return str(get_plotlyjs())


def _hash(script: str) -> str:
    """Returns the hash of a script for the Content-Security-Policy (CSP level 2, section 4.2.5)."""
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HTML_DIRECTORY), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"cut": cut, "lines": _lines}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def _section(number: int, capture: Capture, num_captures: int, figures: dict[str, Figure]) -> dict[str, Any]:
    """Returns the template's variables for a capture, and adds its charts to `figures`."""
    lines = timeline(capture, MAX_SPANS // num_captures)
    figures[f"ranks{number}"] = by_rank(capture)
    figures[f"timeline{number}"] = lines.figure
    ranks = [f"rank {trace.rank}" for trace in capture.ranks]
    return {
        "number": number,
        "capture": capture,
        "about": _about(capture),
        "timeline": lines,
        "ranks": [tables.ranks(capture), tables.memory(capture)],
        "waits": _without_empty(
            tables.idle(ranks, capture.rank_means), tables.critical_path(capture), tables.launches(capture)
        ),
        "collectives": tables.collectives(capture),
        "top": _without_empty(tables.kernels(capture), tables.operators(capture)),
    }


def _without_empty(*shown: tables.Table) -> list[tables.Table]:
    return [table for table in shown if table.rows]


def _about(capture: Capture) -> list[tuple[str, str]]:
    steps = sorted({step.number for trace in capture.ranks for step in trace.steps})
    ranks = f"{len(capture.ranks)} of {capture.world_size}"
    if capture.missing:
        ranks += f"; missing: {_some([str(rank) for rank in capture.missing])}"
    return [
        ("ranks", ranks),
        ("hosts", _some(list(dict.fromkeys(trace.host for trace in capture.ranks)))),
        ("device", _some(sorted({trace.device_name or trace.device for trace in capture.ranks}))),
        ("steps", _range(steps)),
        ("mean step", duration(capture.mean.wall_s)),
        ("events", f"{sum(trace.num_events for trace in capture.ranks):,}"),
    ]


def _range(steps: Sequence[int]) -> str:
    if len(steps) < 2:
        return f"1 (number {steps[0]})" if steps else "none"
    return f"{len(steps)} ({steps[0]} to {steps[-1]})"


def _some(names: Sequence[str]) -> str:
    named = ", ".join(cut(name, _MAX_NAME) or "unknown" for name in names[:_MAX_NAMED])
    num_left = len(names) - _MAX_NAMED
    return f"{named} and {num_left:,} more" if num_left > 0 else named


def _lines(sentences: Sequence[str]) -> list[str]:
    lines = [cut(sentence, _MAX_SENTENCE) for sentence in sentences[:_MAX_SENTENCES]]
    num_left = len(sentences) - _MAX_SENTENCES
    return [*lines, f"and {num_left:,} more"] if num_left > 0 else lines


def _legend(captures: Sequence[Capture]) -> list[tuple[str, str]]:
    shown = present([mean for capture in captures for mean in capture.rank_means], COLUMNS)
    return [(label_of(field), COLORS[field.removesuffix("_s")]) for field in shown]
