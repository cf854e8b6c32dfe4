"""The texts about the cost of a run: a line for `ddp-hpc status`, and the tables of `ddp-hpc report`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddp_hpc.base.text_table import Column, Row, Table, cut, printable, table
from ddp_hpc.base.units import counted, format_walltime
from ddp_hpc.queue.run_cost import CATEGORIES, AttemptCost, RunCost
from ddp_hpc.queue.run_curve import Point

_MOST_REASONS, _REASON_CHARS = 3, 80
# The cost of a run that is smaller is shown in node-minutes.
_SMALL_HOURS = 0.1


def cost_line(cost: RunCost) -> str:
    """Returns the node-hours, the useful share of them, and how often and why ranks were started again."""
    text = f"{amount(cost)}, {share(cost.useful_share)} useful"
    if not cost.restarts:
        return text
    shown = [cut(reason, _REASON_CHARS) for reason in cost.restarts[-_MOST_REASONS:]]
    if len(cost.restarts) > _MOST_REASONS:
        shown.insert(0, "...")
    return f"{text}; {counted(len(cost.restarts), 'restart')}: {', '.join(shown)}"


def cost_lines(cost: RunCost, curve: Sequence[Point]) -> Iterator[str]:
    """Yields a table of the categories with node-hours, one of the attempts, and why the attempts ended."""
    for known in (categories_table(cost), attempts_table(cost, curve)):
        yield table(known.columns, known.rows)
        yield ""
    yield from reasons(cost)


def categories_table(cost: RunCost) -> Table:
    """Returns the node-hours of each category."""
    total = cost.total_node_hours
    known = {title: cost.node_hours[name] for name, title in CATEGORIES.items() if cost.node_hours[name]}
    rows = [{"name": title, "hours": spent, "share": spent / total} for title, spent in known.items()]
    rows.append({"name": "total", "hours": total, "share": 1.0})
    return Table((Column("name", ""), _amounts(cost), Column("share", "share", share)), rows)


def attempts_table(cost: RunCost, curve: Sequence[Point]) -> Table:
    """Returns the cost of each attempt, and its steps as far as they were recorded."""
    columns = [
        Column("attempt", "attempt"),
        Column("job_id", "job"),
        Column("num_nodes", "nodes"),
        Column("wall_s", "time", lambda wall_s: format_walltime(round(wall_s))),
        _amounts(cost),
        Column("share", "useful", share),
        Column("step", "last step", "{:,.0f}".format),
        Column("rate", "steps/s", "{:.3g}".format),
        Column("data", "waiting for data", share),
        Column("loss", "last loss", "{:.4g}".format),
    ]
    rows = [
        _attempt(
            attempt, [p for p in curve if (p.attempt, p.job_id) == (str(attempt.attempt), attempt.job_id)]
        )
        for attempt in cost.attempts
    ]
    always = ("attempt", "job_id", "num_nodes", "wall_s", "hours", "share")
    shown = [c for c in columns if c.field in always or any(row[c.field] is not None for row in rows)]
    return Table(shown, rows)


def _attempt(attempt: AttemptCost, points: Sequence[Point]) -> Row:
    spent = sum(attempt.node_hours.values())
    own_s = sum(point.duration_s for point in points)
    return vars(attempt) | {
        "attempt": str(attempt.attempt),
        "hours": spent,
        "share": attempt.node_hours["useful_steps"] / spent if spent else None,
        "step": points[-1].step if points else None,
        "rate": sum(point.num_steps for point in points) / own_s if own_s else None,
        "data": sum(point.data_s for point in points) / own_s if own_s else None,
        "loss": points[-1].loss if points else None,
    }


def reasons(cost: RunCost) -> Iterator[str]:
    """Yields why each attempt ended, as far as this is known."""
    for attempt in cost.attempts:
        if attempt.reason:
            yield printable(f"attempt {attempt.attempt} of job {attempt.job_id} ended: {attempt.reason}")


def amount(cost: RunCost) -> str:
    """Returns the node-hours of a run, or its node-minutes if there are few."""
    column = _amounts(cost)
    return f"{column.write(cost.total_node_hours)} {column.title}"


def _amounts(cost: RunCost) -> Column:
    if cost.total_node_hours < _SMALL_HOURS:
        return Column("hours", "node-minutes", lambda node_hours: _hours(60 * node_hours))
    return Column("hours", "node-hours", _hours)


def _hours(node_hours: float) -> str:
    """Returns node-hours with three digits."""
    return f"{node_hours:,.0f}" if node_hours >= 1000 else f"{node_hours:.3g}"


def share(part: float | None) -> str:
    """Returns a share as a percentage."""
    return "-" if part is None else f"{100 * part:.0f} %"
