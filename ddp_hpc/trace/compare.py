"""Describes the difference between two captures in one sentence."""

from __future__ import annotations

from collections import defaultdict

from ddp_hpc.trace.event_names import AUTOGRAD
from ddp_hpc.trace.findings import PART_NAMES
from ddp_hpc.trace.trace_records import Capture
from ddp_hpc.units import counted, duration

_ALIKE = 0.03
_MAIN_SHARE = 0.2
_OTHER_MODEL = 0.1
"""Fraction of the operators in the backward pass that must differ for a warning about the model."""


def compare(capture: Capture, other: Capture) -> str:
    """Compares the time of a step in `capture` with `other`, with the parts that changed most first.

    The text begins with a warning if the devices, the numbers of ranks or the models differ.
    """
    return _different(capture, other) + _compare(capture, other)


def _different(capture: Capture, other: Capture) -> str:
    pairs = [
        tuple(counted(one.world_size, "rank") for one in (capture, other)),
        (_devices(capture), _devices(other)),
    ]
    found = [f"{this} and {that}" for this, that in pairs if this != that]
    text = ""
    if found:
        text = f"Warning: {capture.name} and {other.name} were recorded on {', '.join(found)}, respectively. "
    if calls := _other_model(capture, other):
        name, this, that = calls
        text += (
            f"Warning: {capture.name} and {other.name} may have trained different models or a different "
            f"number of batches per step, since {name} ran {this:.3g} and {that:.3g} times per step, "
            "respectively. "
        )
    return text


def _devices(capture: Capture) -> str:
    """Returns the device types and the product names of the devices."""
    return ", ".join(
        sorted(
            {f"{one.device} ({one.device_name})" if one.device_name else one.device for one in capture.ranks}
        )
    )


def _other_model(capture: Capture, other: Capture) -> tuple[str, float, float] | None:
    """Returns the operator of the backward pass whose calls per step differ most, if many of them do."""
    this, that = _backward_calls(capture), _backward_calls(other)
    # A compiled model has a single operator instead of those of its layers.
    if not this or not that or any("Compiled" in name for name in (*this, *that)):
        return None
    differences = {name: abs(this.get(name, 0.0) - that.get(name, 0.0)) for name in sorted({*this, *that})}
    if sum(differences.values()) <= _OTHER_MODEL * (sum(this.values()) + sum(that.values())):
        return None
    name = max(differences, key=lambda name: differences[name])
    return name, this.get(name, 0.0), that.get(name, 0.0)


def _backward_calls(capture: Capture) -> dict[str, float]:
    """Returns the calls per step and rank of the operators that autograd runs in the backward pass."""
    calls: defaultdict[str, float] = defaultdict(float)
    for trace in capture.ranks:
        for op in trace.ops:
            if op.name.startswith(AUTOGRAD):
                calls[op.name.removeprefix(AUTOGRAD).lstrip(": ")] += op.num_calls / len(trace.steps)
    return {name: number / len(capture.ranks) for name, number in calls.items()}


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
