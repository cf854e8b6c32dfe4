"""Describes the difference between two captures in one sentence."""

from __future__ import annotations

from collections import defaultdict

from ddp_hpc.base.units import counted, duration
from ddp_hpc.trace.analysis_results import Capture
from ddp_hpc.trace.event_names import AUTOGRAD
from ddp_hpc.trace.findings import PART_NAMES

_ALIKE = 0.03
_MAIN_SHARE = 0.1
"""Fraction of the difference between two steps that a part must have to be mentioned."""
_OTHER_MODEL = 0.1
"""Fraction of the operators in the backward pass that must differ for a warning about the model."""


def compare(capture: Capture, other: Capture) -> str:
    """Compares the time of a step in `capture` with `other`, and names the parts that changed, beginning with
    the largest change.

    The text begins with a warning if the devices, the numbers of ranks or the models differ.
    """
    return _different(capture, other) + _compare(capture, other)


def _different(capture: Capture, other: Capture) -> str:
    places = [f"{counted(each.world_size, 'rank')}, {_devices(each)}" for each in (capture, other)]
    text = ""
    if places[0] != places[1]:
        text = (
            f"Warning: {capture.name} was recorded on {places[0]}, but {other.name} on {places[1]}; this can "
            "cause a part of the difference.\n"
        )
    if calls := _other_model(capture, other):
        name, calls_here, calls_there = calls
        text += (
            f"Warning: {capture.name} and {other.name} may have trained different models or a different "
            f"number of batches per step, since {name} ran {calls_here:.3g} and {calls_there:.3g} times per "
            "step, respectively.\n"
        )
    return text


def _devices(capture: Capture) -> str:
    """Returns the device types and the product names of the devices."""
    kinds = {(trace.device, trace.device_name) for trace in capture.ranks}
    return ", ".join(sorted(f"{device} ({name})" if name else device for device, name in kinds))


def _other_model(capture: Capture, other: Capture) -> tuple[str, float, float] | None:
    """Returns the operator of the backward pass whose number of calls per step differs most.

    Returns None if the numbers of calls differ by so little that the models are probably equal.
    """
    calls, other_calls = _backward_calls(capture), _backward_calls(other)
    # A compiled model has a single operator instead of those of its layers.
    if not calls or not other_calls or any("Compiled" in name for name in (*calls, *other_calls)):
        return None
    differences = {
        name: abs(calls.get(name, 0.0) - other_calls.get(name, 0.0))
        for name in sorted({*calls, *other_calls})
    }
    if sum(differences.values()) <= _OTHER_MODEL * (sum(calls.values()) + sum(other_calls.values())):
        return None
    name = max(differences, key=lambda name: differences[name])
    return name, calls.get(name, 0.0), other_calls.get(name, 0.0)


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
        (getattr(capture.mean, f"{part}_s") - getattr(other.mean, f"{part}_s"), name)
        for part, name in PART_NAMES.items()
    )
    shorter = [f"{name} by {duration(-change)}" for change, name in changes if change <= -least_s]
    longer = [f"{name} by {duration(change)}" for change, name in reversed(changes) if change >= least_s]
    for parts, word in ((shorter, "Shorter"), (longer, "Longer")):
        if parts:
            text += f" {word}: {', '.join(parts)}."
    return text
