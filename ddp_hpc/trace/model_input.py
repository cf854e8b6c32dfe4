"""Finds the input of the model's first layer, whose shape shows the batch size."""

from __future__ import annotations

import re

import numpy as np

from ddp_hpc.trace.events_by_kind import Recording
from ddp_hpc.trace.step_times import Steps

_LAYER = re.compile(r"aten::(_?conv(?!\w*backward)\w*|linear|mm|embedding|addmm)")
_SECOND = ("embedding", "addmm")
"""The layers whose input is the second argument; the first one is the weight or the bias."""


def first_input(recording: Recording, steps: Steps) -> str:
    """Returns the shape and data type of the input of the first layer in the steps, or why it is unknown."""
    host = recording.host
    has_shapes = host.where(lambda category, _: category == "cpu_op") & (host.fields["shapes"] > 0)
    if not has_shapes.any():
        return "shapes were not recorded (record_shapes=True)"
    is_layer = has_shapes & host.where(lambda _, name: _LAYER.fullmatch(name))
    at = np.flatnonzero(is_layer & steps.contain_on_host(host.starts))
    if not len(at):
        return "unknown, because no convolution, embedding or linear layer was recorded"
    first = at[np.lexsort((-host.durations[at], host.starts[at]))[0]]
    name = host.names[host.name[first]][1]
    shapes, _, dtype = recording.shapes[host.fields["shapes"][first]].partition(" (")
    arguments = shapes.split(", ")
    shape = arguments[min(name.endswith(_SECOND), len(arguments) - 1)]
    first_dimension, *others = shape.split("x")
    is_batch = len(others) > (not name.endswith("embedding"))
    size = f"batch size {first_dimension}" if is_batch else f"{first_dimension} samples or tokens"
    return " ".join(filter(None, (size, f"({shape}", re.split("[,)]", dtype)[0], f"in {name})")))
