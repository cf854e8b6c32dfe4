"""Compares the results of `ddp-hpc bench comm` with those of an earlier run (--baseline)."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.text_table import Row
from ddp_hpc.base.units import format_bytes

_SAME = ("ranks", "backend", "device")
_KEY = ("name", "bytes", "dtype", "ranks", "ranks_per_node")
_MAX_NAMED = 5


def read_baseline(path: Path, settings: dict[str, Any]) -> dict[Hashable, float]:
    """Reads the medians of a comparable earlier run in microseconds, by the keys of the rows.

    Raises:
        RequestError: the file was not written by `bench comm`, or was measured with other ranks, another
            backend or another device.
    """
    try:
        result = json.loads(path.read_bytes())
        if result["name"] != "comm":
            raise RequestError(
                f"--baseline {path} was written by bench {result['name']}; give a file written by bench comm "
                "--json"
            )
        baseline = {name: result["settings"][name] for name in _SAME}
        medians = {key_of(row): float(row["median_us"]) for row in result["rows"]}
    except OSError as error:
        raise RequestError(f"cannot read --baseline {path} ({error.strerror}); choose another file") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RequestError(
            f"--baseline {path} was not written by bench comm; create a baseline with bench comm --json"
        ) from None
    other = [
        f"{name} {baseline[name]} (now {settings[name]})"
        for name in _SAME
        if baseline[name] != settings[name]
    ]
    if other:
        raise RequestError(
            f"--baseline {path} was measured with {', '.join(other)} and is not comparable; "
            "create a baseline with the current settings"
        )
    return medians


def key_of(row: Row) -> Hashable:
    """Returns the fields that identify a row when two runs are compared.

    Raises:
        KeyError: a field is missing.
    """
    return tuple(row[field] for field in _KEY)


def slower_rows(rows: Sequence[Row], medians: dict[Hashable, float], tolerance: float) -> list[str]:
    """Describes each row whose median exceeds that of the baseline by more than the given fraction."""
    found = []
    for row in rows:
        before_us, now_us = medians.get(key_of(row)), row["median_us"]
        if before_us is not None and now_us > before_us * (1 + tolerance):
            found.append(
                f"{row['name']} of {format_bytes(row['bytes'])} on {row['ranks']} ranks: "
                f"{before_us:,.0f} us -> {now_us:,.0f} us (+{now_us / before_us - 1:.0%})"
            )
    return found


def describe(slower: Sequence[str], path: Path, tolerance: float) -> str:
    """Returns one line that lists the first few slower rows and counts the others."""
    more = f"; and {len(slower) - _MAX_NAMED} more" if len(slower) > _MAX_NAMED else ""
    return (
        f"{len(slower)} row{'s are' if len(slower) > 1 else ' is'} slower than --baseline {path} by more "
        f"than {tolerance:.0%}: {'; '.join(slower[:_MAX_NAMED])}{more}"
    )
