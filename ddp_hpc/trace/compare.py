"""What changed between two captures, in a sentence."""

from __future__ import annotations

from ddp_hpc.trace.capture import WORDS
from ddp_hpc.trace.model import Capture
from ddp_hpc.units import duration

_ALIKE = 0.03
_MAIN_SHARE = 0.2


def compare(capture: Capture, other: Capture) -> str:
    """What of a step's time in `other` is different in `capture`, the largest part first."""
    here_s, there_s = capture.mean.wall_s, other.mean.wall_s
    saved_s = there_s - here_s
    head = f"{capture.name} against {other.name}: a step takes {duration(here_s)}, not {duration(there_s)}"
    changes = sorted(
        ((getattr(other.mean, f"{part}_s") - getattr(capture.mean, f"{part}_s"), part) for part in WORDS),
        reverse=saved_s > 0,
    )
    if abs(saved_s) <= _ALIKE * max(here_s, there_s):
        moved = [change for change in (changes[0], changes[-1]) if abs(change[0]) > _ALIKE * here_s]
        return f"{head}, which is alike" + (
            f", though of it {_parts(moved, capture, other)}." if moved else " in all of its parts."
        )
    main = [change for change in changes if change[0] / saved_s >= _MAIN_SHARE] or changes[:1]
    share = sum(change for change, _ in main) / saved_s
    ratio = max(here_s, there_s) / max(min(here_s, there_s), 1e-12)
    faster = "faster" if saved_s > 0 else "slower"
    return (
        f"{head} ({ratio:.3g} times {faster}): {_parts(main, capture, other)}, "
        f"which is {min(share, 1.0):.0%} of the difference."
    )


def _parts(changes: list[tuple[float, str]], capture: Capture, other: Capture) -> str:
    return " and ".join(
        f"{WORDS[part]} takes {duration(getattr(capture.mean, f'{part}_s'))}, "
        f"not {duration(getattr(other.mean, f'{part}_s'))}"
        for _, part in changes
    )
