"""Describes the difference between two captures in one sentence."""

from __future__ import annotations

from ddp_hpc.trace.capture import PART_NAMES
from ddp_hpc.trace.trace_records import Capture
from ddp_hpc.units import counted, duration

_ALIKE = 0.03
_MAIN_SHARE = 0.2


def compare(capture: Capture, other: Capture) -> str:
    """Compares the time of a step in `capture` with `other`, with the parts that changed most first.

    The sentence begins with a note if the captures are of different devices or numbers of ranks.
    """
    return _different(capture, other) + _compare(capture, other)


def _different(capture: Capture, other: Capture) -> str:
    pairs = [
        tuple(counted(one.world_size, "rank") for one in (capture, other)),
        tuple(", ".join(sorted({trace.device for trace in one.ranks})) for one in (capture, other)),
    ]
    found = [f"{this} and {that}" for this, that in pairs if this != that]
    if not found:
        return ""
    return f"Warning: {capture.name} and {other.name} were recorded on {', '.join(found)}, respectively. "


def _compare(capture: Capture, other: Capture) -> str:
    this_s, other_s = capture.mean.wall_s, other.mean.wall_s
    saved_s = other_s - this_s
    head = (
        f"{capture.name} compared with {other.name}: "
        f"a step takes {duration(this_s)} instead of {duration(other_s)}"
    )
    changes = sorted(
        (
            (getattr(other.mean, f"{part}_s") - getattr(capture.mean, f"{part}_s"), part)
            for part in PART_NAMES
        ),
        reverse=saved_s > 0,
    )
    if abs(saved_s) <= _ALIKE * max(this_s, other_s):
        changed = [change for change in (changes[0], changes[-1]) if abs(change[0]) > _ALIKE * this_s]
        return f"{head}, about the same" + (
            f" in total, but {_parts(changed, capture, other)}." if changed else " in all parts."
        )
    main = [change for change in changes if change[0] / saved_s >= _MAIN_SHARE] or changes[:1]
    against = [change for change in reversed(changes) if change[0] / saved_s <= -_MAIN_SHARE]
    share = sum(change for change, _ in main) / saved_s
    ratio = max(this_s, other_s) / max(min(this_s, other_s), 1e-12)
    faster = "faster" if saved_s > 0 else "slower"
    return (
        f"{head} ({ratio:.3g} times {faster}): {_parts(main, capture, other)}, "
        f"which is {share:.0%} of the difference"
        + (f", while {_parts(against, capture, other)}." if against else ".")
    )


def _parts(changes: list[tuple[float, str]], capture: Capture, other: Capture) -> str:
    return " and ".join(
        f"{PART_NAMES[part]} takes {duration(getattr(capture.mean, f'{part}_s'))} "
        f"instead of {duration(getattr(other.mean, f'{part}_s'))}"
        for _, part in changes
    )
