"""Formats the result of a scaling benchmark as text."""

from __future__ import annotations

import math
from typing import Any

from ddp_hpc.base import text_table as tables
from ddp_hpc.base.units import counted


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


def table(result: dict[str, Any]) -> str:
    """Formats the rows of the result as aligned text."""
    return tables.table(_COLUMNS, result["rows"])


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
            f"{settings['model']}, {settings['parameters']:,} parameters{training}",
            f"up to {counted(max(row['ranks'] for row in rows), 'rank')} on "
            f"{counted(machine['nodes'], 'node')}, {device}{backend}",
            *of_modes,
            f"medians of {settings['steps']} steps after {settings['warm_up']} warm-up steps",
            f"speed-up and efficiency relative to {' or '.join(counted(base, 'rank') for base in bases)}",
            *([f"exposed communication in {traced} more steps"] if traced else []),
            ", ".join(f"{name} {versions[name]}" for name in known),
            f"measured {result['measured'][:10]}.",
        ]
    )
