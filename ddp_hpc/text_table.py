"""Aligned text for a terminal or a batch log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of a table: the field that it shows, its heading, and the function that formats a value."""

    field: str
    title: str
    write: Callable[[Any], str] = str


def table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Returns the rows as aligned lines: the first column is left-aligned, the others right-aligned."""
    lines = [[column.title for column in columns]]
    lines += [
        ["-" if row[column.field] is None else column.write(row[column.field]) for column in columns]
        for row in rows
    ]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def cut(text: str, limit: int) -> str:
    """Returns the text, shortened to this length; `...` replaces the end of a longer text."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
