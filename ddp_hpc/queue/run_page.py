"""The HTML page on a run: one picture of its whole life, and what it cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.base.run_state import RunState
from ddp_hpc.base.text_table import printable
from ddp_hpc.base.units import counted, duration
from ddp_hpc.queue.cost_text import amount, attempts_table, categories_table, reasons, share
from ddp_hpc.queue.run_cost import CATEGORIES, AttemptCost, RunCost
from ddp_hpc.queue.run_curve import Point
from ddp_hpc.trace.html_document import document
from ddp_hpc.trace.html_figures import COLORS, Figure, axis, base_layout, plain

# The first color is that of useful steps; what costs time without training is red or yellow.
_COLORS = {
    "useful_steps": COLORS["optimizer"],
    "start": COLORS["forward"],
    "repeated_steps": COLORS["comm_exposed"],
    "detection": COLORS["comm_hidden"],
    "restarts": COLORS["data"],
    "node_checks": COLORS["memcpy"],
    "after_the_end": COLORS["other"],
    "unknown": COLORS["idle"],
}
_LOST_COLOR = COLORS["idle"]
_MAX_POINTS, _MAX_SPANS = 4000, 4000
_LINEAR = 100.0


@dataclass(frozen=True)
class _Clock:
    """Converts times to the unit of the horizontal axis, from the start of the first job."""

    zero_s: float
    unit: str
    unit_s: float

    def at(self, at_s: float) -> float:
        return self.length(at_s - self.zero_s)

    def length(self, duration_s: float) -> float:
        return round(duration_s / self.unit_s, 5)


def _clock(cost: RunCost) -> _Clock:
    spans = [span for attempt in cost.attempts for span in attempt.spans]
    zero_s = min((span.from_s for span in spans), default=0.0)
    length_s = max((span.until_s for span in spans), default=0.0) - zero_s
    if length_s > 3 * 3600:
        return _Clock(zero_s, "hours", 3600.0)
    return _Clock(zero_s, "minutes", 60.0) if length_s > 300 else _Clock(zero_s, "seconds", 1.0)


def page(run_dir: Path, state: RunState | None, cost: RunCost, curve: Sequence[Point]) -> str:
    """Returns an HTML document about the run; see `document`.

    Raises:
        RequestError: plotly is not installed.
    """
    figures = {"life": _life(cost, curve)}
    shown = {span.category for attempt in cost.attempts for span in attempt.spans}
    return document(
        "run.html.j2",
        figures,
        name=printable(str(run_dir)),
        about=[*_about(state, cost, curve)],
        reasons=[*reasons(cost)],
        legend=[(CATEGORIES[name], color) for name, color in _COLORS.items() if name in shown],
        categories=categories_table(cost),
        attempts=attempts_table(cost, curve),
        has_loss=any(point.loss is not None for point in curve),
        warnings=(),
    )


def _about(state: RunState | None, cost: RunCost, curve: Sequence[Point]) -> Iterator[tuple[str, str]]:
    if state is not None:
        yield "state", f"{state.state}, step {state.step:,}"
    yield "cost", f"{amount(cost)}, {share(cost.useful_share)} useful"
    num_jobs = len({attempt.job_id for attempt in cost.attempts})
    yield "attempts", f"{len(cost.attempts)} in {counted(num_jobs, 'job')}"
    kept = [point for point in curve if point.is_kept]
    losses = [point for point in kept if point.loss is not None]
    if losses:
        first, last = losses[0], losses[-1]
        yield (
            "mean loss",
            f"{first.loss:.4g} (until step {first.step:,}) to {last.loss:.4g} (step {last.step:,})",
        )
    if rates := [point.steps_per_s for point in kept if point.steps_per_s is not None]:
        yield "steps per second", f"{min(rates):.3g} to {max(rates):.3g}"
    if waits := [point for point in kept if point.data_share is not None]:
        worst = max(waits, key=lambda point: point.data_share or 0.0)
        yield "waiting for data", f"at most {share(worst.data_share)} of the time (near step {worst.step:,})"


def _life(cost: RunCost, curve: Sequence[Point]) -> Figure:
    """Returns the loss, the speed, and what the nodes did, over the time since the first job began."""
    clock = _clock(cost)
    data = [*_bars(cost.attempts, clock), *_ends(cost.attempts, clock)]
    has_loss = any(point.loss is not None for point in curve)
    points = curve[:: max(1, -(-len(curve) // _MAX_POINTS))]
    if has_loss:
        data += _lines(points, "loss", "y", clock)
    data += _lines(points, "steps_per_s", "y2", clock)
    hidden = axis(domain=[0, 0.12], fixedrange=True, showticklabels=False, showgrid=False, range=[-0.6, 0.6])
    layout = base_layout() | {
        "barmode": "overlay",
        "xaxis": axis(f"{clock.unit} since the start of the first job", anchor="y3"),
        "yaxis": axis("loss", domain=[0.58, 1], type=_scale(curve)),
        "yaxis2": axis("steps per second", domain=[0.18, 0.52 if has_loss else 1], rangemode="tozero"),
        "yaxis3": hidden,
    }
    return {"data": data, "layout": layout, "height": 520 if has_loss else 360}


def _scale(curve: Sequence[Point]) -> str:
    """Returns the scale of the losses: logarithmic if the largest would hide the others."""
    losses = [point.loss for point in curve if point.loss is not None]
    return "log" if losses and min(losses) > 0 and max(losses) > _LINEAR * min(losses) else "linear"


def _bars(attempts: Sequence[AttemptCost], clock: _Clock) -> Iterator[dict[str, Any]]:
    """Yields a bar for each span. Of very many, only the longest are drawn."""
    spans = [(span, attempt) for attempt in attempts for span in attempt.spans]
    spans = sorted(spans, key=lambda known: known[0].from_s - known[0].until_s)[:_MAX_SPANS]
    for category, color in _COLORS.items():
        some = [(span, attempt) for span, attempt in spans if span.category == category]
        if some:
            yield {
                "type": "bar",
                "orientation": "h",
                "name": CATEGORIES[category],
                "base": [clock.at(span.from_s) for span, _ in some],
                "x": [clock.length(span.until_s - span.from_s) for span, _ in some],
                "y": [0] * len(some),
                "width": 1,
                "yaxis": "y3",
                "marker": {"color": color, "line": {"width": 0}},
                "hovertext": [
                    f"{CATEGORIES[category]}: {duration(span.until_s - span.from_s)}"
                    + "".join(
                        f"<br>{CATEGORIES[name]}: {duration(s)}" for name, s in span.parts_s.items() if s
                    )
                    + f"<br>attempt {attempt.attempt} in job {plain(attempt.job_id)}"
                    for span, attempt in some
                ],
                "hoverinfo": "text",
            }


def _ends(attempts: Sequence[AttemptCost], clock: _Clock) -> Iterator[dict[str, Any]]:
    """Yields the ends of the attempts, with their reasons."""
    ended = [attempt for attempt in attempts if attempt.reason and attempt.spans]
    yield {
        "type": "scatter",
        "mode": "markers",
        "name": "end of an attempt",
        "x": [clock.at(attempt.spans[-1].until_s) for attempt in ended],
        "y": [0.5] * len(ended),
        "yaxis": "y3",
        "marker": {"symbol": "triangle-down", "size": 11, "color": COLORS["comm_exposed"]},
        "hovertext": [f"attempt {attempt.attempt} ended:<br>{plain(attempt.reason)}" for attempt in ended],
        "hoverinfo": "text",
        "cliponaxis": False,
    }


def _lines(points: Sequence[Point], field: str, y_axis: str, clock: _Clock) -> Iterator[dict[str, Any]]:
    """Yields a line for the steps that were kept, and one for those that were lost."""
    for is_kept, color in ((True, COLORS["backward"]), (False, _LOST_COLOR)):
        some = [point for point in points if point.is_kept is is_kept]
        xs: list[float | None] = []
        ys: list[float | None] = []
        texts: list[str] = []
        for before, point in zip([None, *some], some, strict=False):
            is_other = before is not None and (before.attempt, before.job_id) != (point.attempt, point.job_id)
            if is_other:  # no line between attempts
                xs, ys, texts = [*xs, None], [*ys, None], [*texts, ""]
            xs.append(clock.at(point.at_s))
            ys.append(getattr(point, field))
            texts.append(_text(point))
        if some:
            yield {
                "type": "scatter",
                "mode": "lines+markers" if len(some) < 60 else "lines",
                "name": field,
                "x": xs,
                "y": ys,
                "yaxis": y_axis,
                "line": {"color": color, "width": 1.5},
                "hovertext": texts,
                "hoverinfo": "text",
            }


def _text(point: Point) -> str:
    lines = [f"until step {point.step:,}, attempt {plain(point.attempt)}"]
    if point.loss is not None:
        lines.append(f"mean loss {point.loss:.5g}")
    if point.steps_per_s is not None:
        lines.append(f"{point.steps_per_s:.3g} steps per second")
    if point.data_share is not None:
        lines.append(f"waiting for data {share(point.data_share)}")
    if not point.is_kept:
        lines.append("repeated later")
    return "<br>".join(lines)
