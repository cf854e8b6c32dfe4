"""The report as one HTML page that needs no network: `ddp-hpc report -o report.html`.

Names come out of traces and may be anything: the template escapes them, plotly's labels too, and the
page's Content-Security-Policy lets only its own two scripts run and nothing be loaded.
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

from ddp_hpc.errors import RequestError
from ddp_hpc.trace import page_tables as tables
from ddp_hpc.trace.model import PARTS, REGIONS, Capture
from ddp_hpc.trace.page_figures import COLOURS, MANY_RANKS, Figure, by_rank, cut, label_of, mean_steps
from ddp_hpc.trace.page_timeline import MAX_SPANS, timeline

_FOLDER = Path(__file__).parent / "html"
_MAX_NAMED = 8
_MAX_NAME = 80
_MAX_SENTENCES = 100
_MAX_SENTENCE = 500


def page(captures: Sequence[Capture], sentences: Sequence[str]) -> str:
    """A whole HTML document, about 5 MB, nearly all of it plotly's script.

    `captures[0]` is the one that is asked about, the others those it is compared with; `sentences` say
    what changed and stand at the top. The text can be encoded as UTF-8.

    Raises:
        RequestError: plotly is not installed.
    """
    plotly = _plotly()
    script = (_FOLDER / "report.js").read_text(encoding="utf-8")
    figures: dict[str, Figure] = {"mean": mean_steps(captures)}
    sections = [_section(number, capture, len(captures), figures) for number, capture in enumerate(captures)]
    text = _environment().get_template("report.html.j2").render(
        captures=captures, sections=sections, sentences=sentences, mean_table=tables.mean_step(captures),
        figures=figures, legend=_legend(), colours=COLOURS, many_ranks=MANY_RANKS, num_regions=len(REGIONS),
        style=Markup((_FOLDER / "report.css").read_text(encoding="utf-8")),  # noqa: S704
        plotly=Markup(plotly), script=Markup(script),  # noqa: S704
        script_hashes=[_hash(plotly), _hash(script)],
    )  # fmt: skip
    # JSON can hold halves of surrogate pairs, which UTF-8 cannot.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise RequestError(
            "the HTML page needs plotly, which is not installed; pip install 'ddp-hpc[report]'"
        ) from error
    return str(get_plotlyjs())


def _hash(script: str) -> str:
    """By which a browser knows the script (CSP level 2, section 4.2.5)."""
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"cut": cut, "ms": tables.ms, "lines": _lines}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def _section(number: int, capture: Capture, num_captures: int, figures: dict[str, Figure]) -> dict[str, Any]:
    """What the template needs of a capture; its charts go into `figures`."""
    lines = timeline(capture, MAX_SPANS // num_captures)
    figures[f"ranks{number}"] = by_rank(capture)
    figures[f"timeline{number}"] = lines.figure
    top = [
        tables.ops(capture, kind, caption)
        for kind, caption in (("kernels", "Kernels by self time"), ("ops", "Operators by self time"))
    ]
    return {
        "number": number,
        "capture": capture,
        "about": _about(capture),
        "timeline": lines,
        "ranks": tables.ranks(capture),
        "collectives": tables.collectives(capture),
        "top": [table for table in top if table.rows],
    }


def _about(capture: Capture) -> list[tuple[str, str]]:
    steps = sorted({step.number for trace in capture.ranks for step in trace.steps})
    ranks = f"{len(capture.ranks)} of {capture.world_size}"
    if capture.missing:
        ranks += f"; missing: {_some([str(rank) for rank in capture.missing])}"
    return [
        ("ranks", ranks),
        ("hosts", _some(list(dict.fromkeys(trace.host for trace in capture.ranks)))),
        ("device", _some(sorted({trace.device for trace in capture.ranks}))),
        ("steps", f"{len(steps)} ({steps[0]} to {steps[-1]})" if steps else "none"),
        ("mean step", f"{tables.ms(capture.mean.wall_s)} ms"),
        ("events", f"{sum(trace.num_events for trace in capture.ranks):,}"),
    ]


def _some(names: Sequence[str]) -> str:
    named = ", ".join(cut(name, _MAX_NAME) or "unknown" for name in names[:_MAX_NAMED])
    more = len(names) - _MAX_NAMED
    return f"{named} and {more:,} more" if more > 0 else named


def _lines(sentences: Sequence[str]) -> list[str]:
    lines = [cut(sentence, _MAX_SENTENCE) for sentence in sentences[:_MAX_SENTENCES]]
    more = len(sentences) - _MAX_SENTENCES
    return [*lines, f"and {more:,} more"] if more > 0 else lines


def _legend() -> list[tuple[str, str]]:
    return [(label_of(field), COLOURS[field.removesuffix("_s")]) for field in (*PARTS, "comm_hidden_s")]
