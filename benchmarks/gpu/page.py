"""The goals, and the files gpu.md and gpu.json, which are written again after each result."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.base.atomic_files import write_atomically

Values = dict[str, Any]
Rows = dict[str, Values]
_FLOAT32 = ("loop: ours", "loop: ours, fused", "loop: ours, CUDA graph")
_TUNED = ("loop: ours, tuned", "loop: ours, tuned, compiled")
_DECODERS = ("decoder", "decoder, compiled")
# Shown in other columns, or too long.
_NOT_SHOWN = ("seconds", "failed", "skipped", "log", "losses")


@dataclass(frozen=True)
class Goal:
    """A limit for the best value of some rows."""

    name: str
    rows: tuple[str, ...]
    key: str
    limit: float
    is_minimum: bool = False

    def value(self, rows: Rows) -> float | None:
        found = [rows[name][self.key] for name in self.rows if self.key in rows.get(name, {})]
        return (max if self.is_minimum else min)(found, default=None)

    def judge(self, rows: Rows, *, is_gpu: bool) -> tuple[str, str, str]:
        """Returns the value, the goal and the verdict."""
        goal, value = f"{'at least' if self.is_minimum else 'at most'} {self.limit:g}", self.value(rows)
        if value is None:
            return "", goal, "not measured" if is_gpu else "needs a GPU"
        met = value >= self.limit if self.is_minimum else value <= self.limit
        return f"{value:.3g}", goal, ("met" if met else "NOT MET") if is_gpu else "needs a GPU"


GOALS = [
    Goal("step in float32 / step of the lesson", _FLOAT32, "vs_lesson", 0.9),
    Goal("tuned step / step of the lesson", _TUNED, "vs_lesson", 0.25),
    Goal("tuned step / shortest possible step", _TUNED, "vs_floor", 1.5),
    Goal("decoder: FLOP/s / rate of matrix products", _DECODERS, "share_of_matmul_rate", 0.55, True),
    Goal("decoder: share of time waiting for data", _DECODERS, "share_waiting_for_data", 0.01),
    Goal("snapshot: pause / copy at 80 % of the PCIe rate", ("snapshots",), "vs_copy_at_80_percent", 1.0),
]


@dataclass(frozen=True)
class Page:
    """Writes the results of all rows to a directory."""

    out: Path
    title: str
    """The command, with its options."""
    rows: Rows

    def verdicts(self) -> dict[str, tuple[str, str, str]]:
        """Returns the value, the limit and the verdict of each goal."""
        is_gpu = self.rows["machine"].get("device") == "cuda"
        return {goal.name: goal.judge(self.rows, is_gpu=is_gpu) for goal in GOALS}

    def write(self) -> None:
        """Replaces both files, so that a kill leaves complete ones."""
        verdicts = self.verdicts()
        document = {"rows": self.rows, "goals": verdicts}
        write_atomically(self.out / "gpu.json", (json.dumps(document, indent=1) + "\n").encode(), "gpu")
        lines = ["# Measurements on one GPU", "", f"Written by `{self.title}`.", ""]
        lines += ["| goal | measured | limit | verdict |", "| --- | --- | --- | --- |"]
        lines += [f"| {name} | {' | '.join(verdict)} |" for name, verdict in verdicts.items()]
        lines += ["", "| row | result | s |", "| --- | --- | --- |"]
        lines += [
            f"| {name} | {result(row)} | {row.get('seconds', 0):.0f} |" for name, row in self.rows.items()
        ]
        write_atomically(self.out / "gpu.md", ("\n".join(lines) + "\n").encode(), "gpu")

    def failed(self) -> list[str]:
        """Returns the names of the rows that failed."""
        return [name for name, row in self.rows.items() if "failed" in row]


def result(row: Values) -> str:
    """Returns the values of a row and its failure as one line."""
    parts = [f"{key} {_text(value)}" for key, value in row.items() if key not in _NOT_SHOWN]
    if "failed" in row:
        parts.insert(0, f"**FAILED**: {row['failed']} (log: {row.get('log', 'none')})")
    if "skipped" in row:
        parts.insert(0, str(row["skipped"]))
    return ", ".join(parts).replace("|", "/").replace("\n", " ")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {text}" for key, text in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
