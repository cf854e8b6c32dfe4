"""Formats the result of a scaling benchmark as text and as Markdown."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ddp_hpc.base import text_table as tables
from ddp_hpc.base.atomic_files import begins_with
from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import counted
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


def check_files(json_file: Path | None, markdown: Path | None) -> None:
    """Raises RequestError if an output cannot be written or would overwrite an unrelated file."""
    is_file = markdown is not None and markdown.is_file()
    if markdown is not None and is_file and not begins_with(markdown, _MARKDOWN_BEGINS.encode()):
        raise RequestError(
            f"--markdown {markdown} exists and was not written by this command; choose another file, or "
            "remove this one"
        )
    if why := check_outputs({"--json": json_file, "--markdown": None if is_file else markdown}, None):
        raise RequestError(why)


def table(result: dict[str, Any]) -> str:
    """Formats the rows of the result as aligned text."""
    return tables.table(_COLUMNS, result["rows"])


def markdown(result: dict[str, Any]) -> str:
    """Formats the result as a Markdown table with a description of the measurement below it."""
    cells = [[column.title for column in _COLUMNS], ["---", *["---:"] * (len(_COLUMNS) - 1)]]
    cells += [
        ["-" if row[column.field] is None else column.write(row[column.field]) for column in _COLUMNS]
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
