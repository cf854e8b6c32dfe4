"""Finds what a trace says about the program: the input of the model's first layer, and the metadata."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ddp_hpc.base.text_table import cut
from ddp_hpc.trace.events_by_kind import Recording
from ddp_hpc.trace.step_times import Steps

_LAYER = re.compile(r"aten::(_?conv(?!\w*backward)\w*|linear|mm|embedding|addmm)")
_SECOND = ("embedding", "addmm")
"""The layers whose input is the second argument; the first one is the weight or the bias."""

_TECHNICAL = re.compile(
    r"schemaVersion|displayTimeUnit|baseTimeNanoseconds|host_name|trace_?[nN]ame|\w*trace_id|record_shapes|with_\w+"
    r"|profile_memory|\w+_version"
)
"""Metadata of the profiler, in contrast to those of the program."""
_VERSION = re.compile(r"(cuda|hip)_(runtime|driver)_version|cupti_version|roctracer_version")
_MOST_FIELDS, _MOST_CHARACTERS = 8, 80


def metadata(head: dict[str, Any], recording: Recording) -> tuple[tuple[str, str], ...]:
    """Returns what the fields of a trace say about the job and the recording: terms and descriptions."""
    info = head.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    said = {
        name.replace("_", " "): info[name]
        for name in ("backend", "nccl_version", "pg_count")
        if isinstance(info.get(name), str | int)
    }
    versions = {
        name.removesuffix("_version").replace("_", " "): version(head[name])
        for name in head
        if _VERSION.fullmatch(name)
    }
    of_program = {
        name: value
        for name, value in head.items()
        if isinstance(value, str | int | float) and not _TECHNICAL.fullmatch(name)
    }
    found = [
        ("name of the trace", str(head.get("traceName", ""))),
        ("process groups", _listed(said)),
        ("versions", _listed(versions)),
        ("metadata of the program", _listed(of_program)),
        ("Python stacks", "" if recording.has_stacks else "not recorded (with_stack=True)"),
    ]
    return tuple((term, text) for term, text in found if text)


def _listed(values: dict[str, Any]) -> str:
    texts = [cut(f"{name} {value}", _MOST_CHARACTERS) for name, value in values.items()]
    return ", ".join(texts[:_MOST_FIELDS])


def version(value: Any) -> str:
    """Returns the version that CUDA and ROCm write as one number.

    >>> version(12040), version(60443483)
    ('12.4', '6.4.43483')
    """
    if isinstance(value, int) and value >= 10_000_000:
        return f"{value // 10**7}.{value // 10**5 % 100}.{value % 10**5}"
    return f"{value // 1000}.{value % 1000 // 10}" if isinstance(value, int) and value >= 1000 else str(value)


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
