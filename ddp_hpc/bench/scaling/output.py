"""Formats the result of a scaling benchmark as text, as Markdown, and as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ddp_hpc.base import text_table as tables
from ddp_hpc.base.atomic_files import begins_with
from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import counted
from ddp_hpc.bench import results_output as report
from ddp_hpc.training.telemetry.metrics_file import check_outputs


def _digits(value: float) -> str:
    """Formats a number with at least three significant digits, and large numbers without decimals."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


_COLUMNS = [
    tables.Column("name", "scaling"),
    tables.Column("ranks", "ranks"),
    tables.Column("nodes", "nodes"),
    tables.Column("batch_size", "batch per rank"),
    tables.Column("global_batch", "batch"),
    tables.Column("samples_per_s", "samples/s", _digits),
    tables.Column("step_s", "step ms", lambda step_s: _digits(1e3 * step_s)),
    tables.Column("speedup", "speed-up", "{:.2f}".format),
    tables.Column("efficiency", "efficiency", "{:.0%}".format),
    tables.Column("comm_share", "communication", "{:.1%}".format),
    tables.Column("data_share", "data", "{:.1%}".format),
]
_MARKDOWN_BEGINS = f"| {_COLUMNS[0].title} | {_COLUMNS[1].title} |"


def check_files(json_file: Path | None, picture: Path | None, markdown: Path | None) -> None:
    """Raises RequestError if an output cannot be written or would overwrite an unrelated file."""
    report.check_files(json_file, picture)
    if markdown is None:
        return
    if any(other is not None and other.absolute() == markdown.absolute() for other in (json_file, picture)):
        raise RequestError(
            f"--markdown {markdown} is also given with another option; use a different file for each option"
        )
    is_file = markdown.is_file()
    if is_file and not begins_with(markdown, _MARKDOWN_BEGINS.encode()):
        raise RequestError(
            f"--markdown {markdown} exists and was not written by this command; choose another file, or "
            "remove this one"
        )
    if not is_file and (why := check_outputs({"--markdown": markdown}, None)):
        raise RequestError(why)


def table(result: dict[str, Any]) -> str:
    """Formats the rows of the result as aligned text."""
    return tables.table(_COLUMNS, result["rows"])


def markdown(result: dict[str, Any]) -> str:
    """Formats the result as a Markdown table with a description of the measurement below it."""
    cells = [[column.title for column in _COLUMNS], ["---", *["---:"] * (len(_COLUMNS) - 1)]]
    cells += [
        ["-" if row[one.field] is None else one.write(row[one.field]) for one in _COLUMNS]
        for row in result["rows"]
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + f"\n\n{caption(result)}\n"


def caption(result: dict[str, Any]) -> str:
    """Returns a description of the training, the machine and the measurement."""
    machine, settings, versions, rows = (result[name] for name in ("machine", "settings", "versions", "rows"))
    training = f" ({' '.join(settings['training'])})" if settings["training"] else ""
    threads = f", {counted(machine['threads'], 'thread')} per rank" if machine["device"] == "cpu" else ""
    device = f"{machine['device_name'] or machine['device']}{threads}"
    # A single rank has no communication backend.
    backend = "" if machine["backend"] == "none" else f", {machine['backend']}"
    kept = {
        "weak": lambda row: f"weak scaling with {row['batch_size']} samples per rank",
        "strong": lambda row: f"strong scaling with {row['global_batch']} samples per step",
    }
    of_modes = dict.fromkeys(kept[row["name"]](row) for row in rows)
    bases = sorted({row["base_ranks"] for row in rows})
    traced = settings["trace_steps"]
    known = [name for name in ("torch", "cuda", "nccl", "ddp_hpc") if name in versions]
    return "; ".join(
        [
            f"{settings['model']}, {settings['parameters']:,} parameters{training}, on up to "
            f"{counted(max(row['ranks'] for row in rows), 'rank')} of {counted(machine['nodes'], 'node')}, "
            f"{machine['ranks_per_node']} per node, {device}{backend}",
            *of_modes,
            f"medians of {settings['steps']} steps after {settings['warm_up']} warm-up steps",
            f"speed-up and efficiency relative to {' or '.join(counted(base, 'rank') for base in bases)}",
            *([f"exposed communication in {traced} more steps"] if traced else []),
            ", ".join(f"{name} {versions[name]}" for name in known),
            f"measured {result['measured'][:10]}.",
        ]
    )


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draws speed-up with its ideal, and efficiency with the share of communication.

    Raises:
        DdpHpcError: the picture cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    rows = result["rows"]
    ranks, base = sorted({row["ranks"] for row in rows}), min(row["base_ranks"] for row in rows)
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    what = result["settings"]["model"], result["machine"]["device_name"], result["measured"][:10]
    figure.suptitle(", ".join(what))
    left, right = figure.subplots(1, 2)
    left.plot(ranks, [one / base for one in ranks], color="0.6", linestyle=":", label="ideal")
    for mode, color in (("weak", "C0"), ("strong", "C1")):
        of_mode = [row for row in rows if row["name"] == mode]
        if not of_mode:
            continue
        at = [row["ranks"] for row in of_mode]
        # If a mode has another base, its speed-up is scaled to the base of the common ideal line.
        scale = of_mode[0]["base_ranks"] / base
        speedups = [scale * row["speedup"] for row in of_mode]
        left.plot(at, speedups, label=f"{mode} scaling", color=color, marker="o")
        right.plot(at, [row["efficiency"] for row in of_mode], color=color, marker="o")
        known = [(row["ranks"], row["comm_share"]) for row in of_mode if row["comm_share"] is not None]
        if known:
            right.plot(*zip(*known, strict=True), color=color, marker="x", linestyle="--")
    titles = f"speed-up relative to {counted(base, 'rank')}", "efficiency, and communication (dashed)"
    left.set_yscale("log")
    for one, title in zip((left, right), titles, strict=True):
        one.set(xlabel="ranks", title=title, xscale="log")
        one.set_xticks(ranks, [str(number) for number in ranks])
        one.minorticks_off()
        one.grid(color="0.9")
    left.set_yticks([number / base for number in ranks], [f"{number / base:g}" for number in ranks])
    left.minorticks_off()
    right.set_ylim(0, max(1.1, *(1.05 * row["efficiency"] for row in rows)))
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(loc="outside lower center", ncols=3)
    report.write_figure(path, figure)
