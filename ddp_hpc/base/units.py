"""Parses and formats walltimes, durations and byte sizes."""

from __future__ import annotations

import re

from ddp_hpc.base.errors import RequestError

_WALLTIME = r"(?a)(?:(?P<days>\d{1,4})-)?(?P<hours>\d{1,5}):(?P<minutes>\d{1,2}):(?P<seconds>\d{1,2})"
_SHORT = r"(?a)(?:(?P<days>\d{1,4})d)?(?:(?P<hours>\d{1,5})h)?(?:(?P<minutes>\d{1,6})m(?:in)?)?"
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BYTES = r"(?a)(\d{1,15}(?:\.\d{1,15})?) ?([KMGTP]iB|B)?"


def parse_walltime_s(text: str) -> int:
    """Returns the seconds of `HH:MM:SS`, `D-HH:MM:SS`, or a short form such as `90m`, `2h` and `1h30m`.

    Two fields are rejected: PBS and Slurm both read `25:30` as minutes and
    seconds, but most users mean hours and minutes.

    Raises:
        RequestError: the text has another format, minutes or seconds above 59, or is zero.
    """
    how = "write HH:MM:SS, such as 01:30:00"
    word = text.strip()
    if full := re.fullmatch(_WALLTIME, word):
        days, hours, minutes, seconds = (
            int(v or 0) for v in full.group("days", "hours", "minutes", "seconds")
        )
        for name, value, limit in (("minutes", minutes, 59), ("seconds", seconds, 59)):
            if value > limit:
                raise RequestError(f"walltime {text!r}: {name} must be at most {limit} (got {value}); {how}")
        if full["days"] and hours > 23:
            raise RequestError(
                f"walltime {text!r}: hours must be at most 23 if days are given (got {hours}); {how}"
            )
    elif word and (short := re.fullmatch(_SHORT, word)):
        days, hours, minutes = (int(v or 0) for v in short.group("days", "hours", "minutes"))
        seconds = 0
    elif re.fullmatch(r"\d+:\d+", word):
        raise RequestError(
            f"walltime {text!r} is ambiguous: schedulers read two fields as minutes and seconds; {how}"
        )
    else:
        raise RequestError(f"walltime {text!r} is not a time; {how}")
    total_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total_s == 0:
        raise RequestError(f"walltime {text!r} is zero; {how}")
    return total_s


def format_walltime(walltime_s: int) -> str:
    """Returns `HH:MM:SS`, which PBS and Slurm read in the same way; hours can exceed 24.

    >>> format_walltime(5400)
    '01:30:00'
    """
    minutes, seconds = divmod(walltime_s, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}"


def counted(number: int, what: str) -> str:
    """Returns a number with its noun in the singular or plural.

    >>> counted(1, "rank"), counted(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {what}{'s' * (number != 1)}"


def duration(duration_s: float) -> str:
    """Returns a readable duration with three digits.

    >>> duration(0.0728)
    '72.8 ms'
    """
    if abs(duration_s) >= 999.5:
        return f"{duration_s:,.0f} s"
    scales = ((1, "s"), (1e3, "ms"), (1e6, "us"))
    factor, unit = next((scale for scale in scales if abs(duration_s) * scale[0] >= 0.9995), scales[-1])
    return f"{duration_s * factor:.3g} {unit}"


def format_bytes(num_bytes: float) -> str:
    """Returns a readable size in powers of 1024.

    >>> format_bytes(90177536)
    '86.0 MiB'
    """
    size = float(num_bytes)
    for unit in _BINARY_UNITS:
        if abs(size) < 1024 or unit == _BINARY_UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def parse_bytes(text: str) -> int:
    """Returns the bytes of `4096`, `64KiB` or `1.5 MiB`, the format of `format_bytes`.

    Raises:
        RequestError: the text has another format (`MB` is ambiguous), or is not a positive number of bytes.
    """
    from fractions import Fraction  # imports decimal, which few commands need

    match = re.fullmatch(_BYTES, text.strip())
    size = Fraction(match[1]) * 1024 ** _BINARY_UNITS.index(match[2] or "B") if match else None
    if size is None or size.denominator != 1 or size == 0:
        raise RequestError(
            f"{text[:40]!r} is not a size; use a number above 0, optionally with the unit "
            f"{', '.join(_BINARY_UNITS[:4])}, such as 64KiB"
        )
    return int(size)
