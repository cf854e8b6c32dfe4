"""An earlier run to compare with: which rows have become slower."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from ddp_hpc.errors import RequestError
from ddp_hpc.tables import Row
from ddp_hpc.units import format_bytes

_SAME = ("ranks", "backend", "device")
_KEY = ("name", "bytes", "dtype", "ranks", "ranks_per_node")
_MAX_NAMED = 5


def read_baseline(path: Path, settings: dict[str, Any]) -> dict[Hashable, float]:
    """The medians of a run that can be compared with one of these settings: microseconds, by the row's key.

    Raises:
        RequestError: the file is none of `bench comm`, or of other ranks, another backend or device.
    """
    try:
        result = json.loads(path.read_bytes())
        if result["name"] != "comm":
            raise RequestError(
                f"--baseline {path}: is of bench {result['name']}; name a --json of bench comm"
            )
        theirs = {name: result["settings"][name] for name in _SAME}
        medians = {key_of(row): float(row["median_us"]) for row in result["rows"]}
    except OSError as error:
        raise RequestError(f"--baseline {path}: cannot be read ({error.strerror}); name another") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RequestError(f"--baseline {path}: is no JSON of bench comm; make one by its --json") from None
    other = [
        f"{name} {theirs[name]} (here {settings[name]})" for name in _SAME if theirs[name] != settings[name]
    ]
    if other:
        raise RequestError(
            f"--baseline {path}: was measured on {', '.join(other)}; times of the two cannot be compared: "
            "make a baseline for this"
        )
    return medians


def key_of(row: Row) -> Hashable:
    """What two runs' rows have in common where they are of one thing.

    Raises:
        KeyError: a field is missing.
    """
    return tuple(row[field] for field in _KEY)


def slower_rows(rows: Sequence[Row], medians: dict[Hashable, float], tolerance: float) -> list[str]:
    """A few words for each row whose median is above the baseline's by more than that share of it."""
    found = []
    for row in rows:
        before_us, now_us = medians.get(key_of(row)), row["median_us"]
        if before_us is not None and now_us > before_us * (1 + tolerance):
            found.append(
                f"{row['name']} of {format_bytes(row['bytes'])} on {row['ranks']} ranks: "
                f"{before_us:,.0f} us -> {now_us:,.0f} us (+{now_us / before_us - 1:.0%})"
            )
    return found


def told(slower: Sequence[str], path: Path, tolerance: float) -> str:
    """One line for the rows that are slower; the worst few by name."""
    more = f"; and {len(slower) - _MAX_NAMED} more" if len(slower) > _MAX_NAMED else ""
    return (
        f"{len(slower)} row{'s are' if len(slower) > 1 else ' is'} slower than --baseline {path} by more "
        f"than {tolerance:.0%}: {'; '.join(slower[:_MAX_NAMED])}{more}"
    )
