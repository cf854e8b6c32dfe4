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

_TOKENS = re.compile(r"execute_(\d+)_context_(\d+)\(.*\)_generation_(\d+)\(")
"""The name of vLLM's annotation of a step."""

_SHOWN_ELSEWHERE = re.compile(
    r"schemaVersion|displayTimeUnit|baseTimeNanoseconds|host_name|traceName|trace_id|rank|world_size"
    r"|record_shapes|with_\w+|profile_memory"
)
_MOST_FIELDS, _MOST_CHARACTERS = 12, 80


def metadata(head: dict[str, Any], recording: Recording) -> tuple[tuple[str, str], ...]:
    """Returns what the fields of a trace say about the job and the versions: terms and descriptions."""
    info = head.get("distributedInfo")
    fields = {**head, **(info if isinstance(info, dict) else {})}
    texts = [
        cut(f"{name} {value}", _MOST_CHARACTERS)
        for name, value in fields.items()
        if isinstance(value, str | int | float) and not _SHOWN_ELSEWHERE.fullmatch(name)
    ]
    of_operators = "none recorded (with_stack=True records them)"
    if recording.has_stacks_of_operators:
        of_operators = "recorded without times, as call stacks of operators, which this report does not show"
    found = [
        ("name of the trace", str(head.get("traceName", ""))),
        ("metadata of the trace", ", ".join(texts[:_MOST_FIELDS])),
        (
            "Python functions",
            "" if recording.has_stacks else of_operators,
        ),
    ]
    return tuple((term, text) for term, text in found if text)


def first_input(recording: Recording, steps: Steps) -> tuple[str, int]:
    """Returns the shape and data type of the input of the first layer in the steps, or why it is unknown, and
    its first dimension if there is one such call per step, or 0.
    """
    host = recording.host
    named = (match for _, name in host.names if (match := _TOKENS.match(name)))
    if match := next(named, None):
        return "{} tokens; requests in the context phase: {}, in generation: {}".format(*match.groups()), 0
    has_shapes = host.where(lambda category, _: category == "cpu_op") & (host.fields["shapes"] > 0)
    if not has_shapes.any():
        return "shapes were not recorded (record_shapes=True)", 0
    is_layer = has_shapes & host.where(lambda _, name: _LAYER.fullmatch(name))
    at = np.flatnonzero(is_layer & steps.contain_on_host(host.starts))
    if not len(at):
        return "unknown, because no convolution, embedding or linear layer was recorded", 0
    first = at[np.lexsort((-host.durations[at], host.starts[at]))[0]]
    calls = recording.launches
    is_graph = calls.where(lambda _, name: "GraphLaunch" in name)
    if (steps.contain_on_host(calls.starts) & is_graph & (calls.starts < host.starts[first])).any():
        return "not recorded, because the first layers run in graphs (CUDA or HIP)", 0
    name = host.names[host.name[first]][1]
    shapes, _, types = recording.shapes[host.fields["shapes"][first]].rstrip(")").partition(" (")
    arguments, dtypes = shapes.split(", "), types.split(", ")
    number = min(name.endswith(_SECOND), len(arguments) - 1)
    is_known = len(dtypes) in (1, len(arguments))  # one, or each only once
    dtype = dtypes[number if len(dtypes) > 1 else 0] if is_known else ""
    same = host.name[at] == host.name[first]
    same &= host.fields["shapes"][at] == host.fields["shapes"][first]
    of_batch, is_matrix, _ = arguments[number].partition("x")
    num = int(of_batch) if is_matrix and same.sum() == len(steps.numbers) else 0
    return " ".join(filter(None, (arguments[number], dtype, f"in {name}"))), num
