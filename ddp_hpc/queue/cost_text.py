"""The texts about the cost of a run: a line for `ddp-hpc status`, and the tables of `ddp-hpc report`."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_hpc.base.text_table import Column, cut, printable, table
from ddp_hpc.base.units import counted, format_walltime
from ddp_hpc.queue.run_cost import CATEGORIES, RunCost

_MOST_REASONS, _REASON_CHARS = 3, 80


def cost_line(cost: RunCost) -> str:
    """Returns the node-hours, the useful share of them, and how often and why ranks were started again."""
    text = f"{_hours(cost.total_node_hours)} node-hours, {_share(cost.useful_share)} useful"
    if not cost.restarts:
        return text
    shown = [cut(reason, _REASON_CHARS) for reason in cost.restarts[-_MOST_REASONS:]]
    if len(cost.restarts) > _MOST_REASONS:
        shown.insert(0, "...")
    return f"{text}; {counted(len(cost.restarts), 'restart')}: {', '.join(shown)}"


def cost_lines(cost: RunCost) -> Iterator[str]:
    """Yields a table of the categories with node-hours, one of the attempts, and why the attempts ended."""
    total = cost.total_node_hours
    known = {title: cost.node_hours[name] for name, title in CATEGORIES.items() if cost.node_hours[name]}
    rows = [{"name": title, "hours": hours, "share": hours / total} for title, hours in known.items()]
    rows.append({"name": "total", "hours": total, "share": 1.0})
    yield table(
        (Column("name", ""), Column("hours", "node-hours", _hours), Column("share", "share", _share)), rows
    )
    yield ""
    columns = (
        Column("attempt", "attempt"),
        Column("job_id", "job"),
        Column("num_nodes", "nodes"),
        Column("wall_s", "time", lambda wall_s: format_walltime(round(wall_s))),
        Column("hours", "node-hours", _hours),
        Column("share", "useful", _share),
    )
    attempts = []
    for attempt in cost.attempts:
        hours = sum(attempt.node_hours.values())
        share = attempt.node_hours["useful_steps"] / hours if hours else None
        attempts.append(vars(attempt) | {"attempt": str(attempt.attempt), "hours": hours, "share": share})
    yield table(columns, attempts)
    for attempt in cost.attempts:
        if attempt.reason:
            yield printable(f"attempt {attempt.attempt} of job {attempt.job_id} ended: {attempt.reason}")


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 1000 else f"{hours:.3g}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
