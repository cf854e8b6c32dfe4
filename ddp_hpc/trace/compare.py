"""Describes the difference between two captures in one sentence."""

from __future__ import annotations

from ddp_hpc.base.units import counted, duration
from ddp_hpc.trace.analysis_results import PART_NAMES, PARTS, Capture

_ALIKE = 0.03
_MAIN_SHARE = 0.1
"""Fraction of the difference between two steps that a part must have to be mentioned."""


def compare(capture: Capture, other: Capture) -> str:
    """Compares the time of a step in `capture` with `other`, and names the parts that changed, beginning with
    the largest change.

    The text begins with a warning if the devices or the numbers of ranks differ.
    """
    return _different(capture, other) + _compare(capture, other)


def _different(capture: Capture, other: Capture) -> str:
    places = [f"{counted(each.world_size, 'rank')}, {_devices(each)}" for each in (capture, other)]
    if places[0] == places[1]:
        return ""
    return (
        f"Warning: {capture.name} was recorded on {places[0]}, but {other.name} on {places[1]}; this can "
        "cause a part of the difference.\n"
    )


def _devices(capture: Capture) -> str:
    """Returns the device types and the product names of the devices."""
    kinds = {(trace.device, trace.device_name) for trace in capture.ranks}
    return ", ".join(sorted(f"{device} ({name})" if name else device for device, name in kinds))


def _compare(capture: Capture, other: Capture) -> str:
    this_s, other_s = capture.mean.wall_s, other.mean.wall_s
    more_s = this_s - other_s
    text = f"{capture.name}: a step takes {duration(this_s)}, "
    is_alike = abs(more_s) <= _ALIKE * max(this_s, other_s)
    if is_alike:
        text += f"about the same as {duration(other_s)} in {other.name}."
    else:
        ratio = abs(more_s) / (other_s or 1.0)
        less = "less" if more_s < 0 else "more"
        text += f"{duration(abs(more_s))} ({ratio:.0%}) {less} than in {other.name} ({duration(other_s)})."
    least_s = _ALIKE * this_s if is_alike else _MAIN_SHARE * abs(more_s)
    changes = sorted(
        (getattr(capture.mean, part) - getattr(other.mean, part), PART_NAMES[part]) for part in PARTS
    )
    shorter = [f"{name} by {duration(-change)}" for change, name in changes if change <= -least_s]
    longer = [f"{name} by {duration(change)}" for change, name in reversed(changes) if change >= least_s]
    for parts, word in ((shorter, "Shorter"), (longer, "Longer")):
        if parts:
            text += f" {word}: {', '.join(parts)}."
    return text
