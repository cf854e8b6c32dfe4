"""Aligned text for a terminal or a batch log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
_MAX_WHOLE_CELL = 2000


@dataclass(frozen=True)
class Column:
    """A column of a table: a field of the rows, the heading, and the function that formats a value."""

    field: str
    title: str
    write: Callable[[Any], str] = str


@dataclass(frozen=True)
class Table:
    """Columns and rows, in which None is an unknown value. The first column has the title of the table."""

    columns: Sequence[Column]
    rows: Sequence[Row]

    @property
    def title(self) -> str:
        """What the rows are."""
        return self.columns[0].title

    def is_number(self, column: Column) -> bool:
        """Returns whether the column is right-aligned and sorted numerically."""
        known = (row[column.field] for row in self.rows if row[column.field] is not None)
        return not isinstance(next(known, 0), str)

    def write(self, column: Column, row: Row) -> str:
        """Returns the text of the cell."""
        value = row[column.field]
        return "-" if value is None else column.write(value)

    def whole(self, column: Column, row: Row) -> str:
        """Returns the whole text of a cell that shows only a part of it, or an empty text."""
        value = row[column.field]
        is_cut = isinstance(value, str) and value != self.write(column, row)
        return cut(value, _MAX_WHOLE_CELL) if is_cut else ""


def table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Returns the rows as aligned lines: the first column is left-aligned, the others right-aligned."""
    lines = [[column.title for column in columns]]
    lines += [
        ["-" if row[column.field] is None else column.write(row[column.field]) for column in columns]
        for row in rows
    ]
    return "\n".join(aligned(lines, num_left=1))


def aligned(lines: Sequence[Sequence[str]], num_left: int) -> list[str]:
    """Returns the lines with aligned columns: the first `num_left` to the left, the others to the right."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    pads = [str.ljust] * num_left + [str.rjust] * (len(widths) - num_left)
    return [
        "  ".join(pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)).rstrip()
        for line in lines
    ]


def cut(text: str, limit: int) -> str:
    """Returns at most `limit` characters of the text; `...` replaces the end of a longer text."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def printable(text: str) -> str:
    """Replaces control characters and invalid bytes, so that the text cannot control the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
