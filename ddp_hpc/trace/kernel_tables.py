"""The tables of what the device runs: kinds of kernels, streams, copies, and kernels by operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from ddp_hpc.base.text_table import Column, Row, Table
from ddp_hpc.base.units import format_bytes
from ddp_hpc.trace.analysis_results import Capture
from ddp_hpc.trace.event_names import STEP, shortened
from ddp_hpc.trace.input_shapes import num_bytes, num_flops
from ddp_hpc.trace.named_results import Launch
from ddp_hpc.trace.sums_over_ranks import ESTIMATES, sums, with_others
from ddp_hpc.trace.table_columns import kernel_name, known, ms, short, sum_columns, us

_MOST_KINDS, _LAUNCHER_LENGTH = 3, 40


def kinds(capture: Capture) -> Table:
    """Returns the time of the kernels and copies of each kind."""
    rows = [row | {"kind": "all", "is_sum": True} for row in sums(capture, "kernels", (), "total_s")]
    rows += with_others(capture, sums(capture, "kernels", ("kind",), "total_s"), "kind")
    rows = [row | {"share": row["total_s"] / (rows[0]["total_s"] or 1.0)} for row in rows]
    columns = sum_columns(capture, Column("kind", "kinds of kernels"), "ms")
    return Table([*columns, Column("share", "share", "{:.1%}".format), *_recorded(ESTIMATES, rows)], rows)


def streams(capture: Capture) -> Table:
    """Returns the time of the kernels and copies in each stream, and what takes most of it."""
    return _divided(capture, "stream", "streams of the device,")


def regions(capture: Capture) -> Table:
    """Returns the time of the kernels and copies launched in each region, and what takes most of it."""
    return _divided(capture, "region", "kernels and copies launched in,")


def _divided(capture: Capture, by: str, title: str) -> Table:
    rows = sums(capture, "kernels", (by,), "total_s")
    _add_most(capture, rows, (by,), ("kind", "operator"))
    for row in rows:
        row |= {"share": row["total_s"] / (capture.mean.wall_s or 1.0), by: row[by] or "others"}
    columns = [
        *sum_columns(capture, Column(by, title), "ms"),
        Column("share", f"share of {capture.a_step}", "{:.1%}".format),
        Column("most_kind", "most of it, ms"),
    ]
    if any(row["most_operator"] for row in rows):
        columns.append(Column("most_operator", "of these operators, ms"))
    return Table(columns, rows if len(rows) > 1 else [])


def _add_most(capture: Capture, rows: list[Row], by: tuple[str, ...], parts: tuple[str, ...]) -> None:
    """Adds what takes most of the time of each row, by the fields of Kernel in `parts`, as text."""
    for part in parts:
        found = sums(capture, "kernels", (*by, part), "total_s")
        found = [one for one in found if one[part] and not one[part].startswith(STEP)]
        for row in rows:
            own = [one for one in found if all(one[name] == row[name] for name in by)][:_MOST_KINDS]
            row[f"most_{part}"] = "; ".join(f"{short(one[part])} {ms(one['total_s'])}" for one in own)


def copies(capture: Capture) -> Table:
    """Returns the copies of each direction and stream, with their sizes and bandwidths."""
    first, *others = sum_columns(capture, Column("name", "copies,"), "ms")
    columns = [
        *(first, Column("stream", "stream"), *others),
        *(Column(f"{one}_s", f"{one} us", us) for one in ("shortest", "longest")),
        Column("bytes", "size", known(format_bytes)),
        Column("speed", "GB/s", known("{:.2f}".format)),
        Column("beside", "beside kernels", "{:.0%}".format),
    ]
    rows = [row for row in sums(capture, "kernels", ("name", "stream"), "total_s") if row["is_copy"]]
    _add_most(capture, rows, ("name", "stream"), ("shapes",))
    if any(row["most_shapes"] for row in rows):
        columns.append(Column("most_shapes", "of these input shapes, ms"))
    for row in rows:
        total_s = row["total_s"] or math.inf
        row |= {"speed": row["bytes"] / total_s / 1e9, "beside": row["running_s"] / total_s}
    return Table(columns, rows)


def kernels(capture: Capture) -> Table:
    """Returns the kernels and copies with the longest time."""
    first, *others = sum_columns(capture, Column("name", "kernels", kernel_name(capture)), "ms")
    rows = with_others(capture, sums(capture, "kernels", ("name", "kind"), "total_s"), "name")
    num_sms = max(trace.num_sms for trace in capture.ranks)
    for row in rows:
        row["longest_at"] = place(capture, row["longest_rank"], row["longest_step"], row["longest_after_s"])
        row["median_s"] = None if row["is_copy"] else row["median_s"]  # of different sizes
        launch = row["launch"] or Launch()
        sizes = ["x".join(map(str, size)) for size in (launch.grid, launch.block) if size]
        row["grid"] = ", ".join(sizes) or None
        if 0 < (num_blocks := math.prod(launch.grid or (0,))) < num_sms:
            row["grid"] += f": on {num_blocks} of {num_sms} SMs or CUs"
        operator = "" if (row["operator"] or "").startswith(STEP) else row["operator"]
        row["launcher"] = " in ".join(filter(None, (row["graph_launch"], operator))) or None
    columns = [
        *(Column(f"{one}_s", f"{one} us", us) for one in ("shortest", "median", "longest")),
        Column("longest_at", "which begins at"),
        *(*ESTIMATES, Column("grid", "grid, block")),
        Column("launcher", "launched by", partial(shortened, limit=_LAUNCHER_LENGTH)),
    ]
    return Table([first, Column("kind", "kind"), *others, *_recorded(columns, rows)], rows)


def place(capture: Capture, rank: int, step: int | None, after_s: float) -> str | None:
    """Returns where a kernel begins: rank, step and time, as far as there are several; None if unknown."""
    if step is None:
        return None
    of_rank, of_step = f"rank {rank}, " * (len(capture.ranks) > 1), f"step {step}, " * capture.has_steps
    return f"{of_rank}{of_step}{ms(capture.in_step_s(rank, step, after_s))} ms"


def _recorded(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Returns the columns in which something is known."""
    return [one for one in columns if any(row[one.field] is not None for row in rows)]


def kernels_by_operator(capture: Capture) -> Table:
    """Returns the kernels and copies of each operator, those with the longest time first."""
    first, *others = sum_columns(capture, Column("operator", "operators and their kernels", short), "ms")
    rows = sums(capture, "kernels", ("operator", "shapes", "name", "kind"), "total_s")
    for row in rows:
        calls_per_s = row["num_calls"] / (row["total_s"] or math.inf)
        is_product = row["kind"] == "matrix products"
        flops = num_flops(row["operator"], row["shapes"], row["name"]) if is_product else 0
        row["tflops"] = calls_per_s * flops / 1e12 or None
        num = 0 if row["is_copy"] else num_bytes(row["operator"], row["kind"], row["shapes"])
        row["speed"] = calls_per_s * num / 1e9 or None
    rows = with_others(capture, [row for row in rows if row["operator"]], "operator")
    shapes = [Column("shapes", "input shapes", short)] if any(row["shapes"] for row in rows) else []
    kernel = Column("name", "kernel", kernel_name(capture))
    speeds = [Column("tflops", "TFLOP/s", "{:.3g}".format), Column("speed", "least GB/s", "{:,.0f}".format)]
    return Table([first, *shapes, kernel, *others, *_recorded(speeds, rows)], rows)
