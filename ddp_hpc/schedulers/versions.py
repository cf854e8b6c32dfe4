"""Versions of schedulers, such as 23.02 or 23.02.7."""

from __future__ import annotations


def is_between(version: str, since: str, until: str) -> bool:
    """Returns whether a version such as `23.02` or `23.02.7` is in a range; the ends may be empty."""
    number = version_number(version)
    return (not since or version_number(since) <= number) and (not until or number <= version_number(until))


def version_number(version: str) -> tuple[int, int]:
    """Returns the year and the month of a version, such as (23, 2) for `23.02.7`."""
    year, _, rest = version.partition(".")
    return int(year), int(rest.partition(".")[0])
