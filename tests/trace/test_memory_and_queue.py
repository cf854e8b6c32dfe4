"""What changes over time: the memory of devices, and the queue of kernels."""

import json

import pytest

from ddp_hpc.trace import tables
from ddp_hpc.trace.analyze_rank import read_rank
from ddp_hpc.trace.html_timeline import timeline
from ddp_hpc.trace.recorded import details
from ddp_hpc.trace.summarize_run import read_capture

from .made import annotation, event, launch, write


def allocation(at_us, allocated, reserved=0, device=(0, -1), tid=1):
    args = {"Device Type": device[0], "Device Id": device[1], "Total Allocated": allocated}
    memory = event("cpu_instant_event", "[memory]", at_us, 0, tid, **args, **{"Total Reserved": reserved})
    return memory | {"ph": "i"}


def recording():
    """Three kernels: 40 us of a step of 100 us without a queue, 50 us with one kernel, 10 us with two."""
    return [
        annotation("ProfilerStep#4", 0, 100),
        annotation("forward", 10, 30),
        event("cpu_op", "aten::mm", 12, 20),
        event("cpu_op", "aten::elsewhere", 12, 20, 2),
        *launch(1, 10, "a", 20, 5),
        *launch(2, 30, "b", 60, 5),
        *launch(3, 50, "c", 80, 20),
        allocation(5, 2 << 30, 3 << 30, (1, 0)),
        allocation(15, 4 << 30, 5 << 30, (1, 0)),
        allocation(20, 4 << 30, 6 << 30, (1, 0), 2),
        allocation(90, 1 << 30, 6 << 30, (1, 0)),
        allocation(50, 1000),
        event("cpu_instant_event", "[memory]", 60, 0, **{"Device Type": 1, "Bytes": 8}) | {"ph": "i"},
    ]


def test_the_peak_of_memory_is_shown_with_its_operator(tmp_path):
    table = tables.memory(read_capture(write(tmp_path / "rank0.json", recording()).parent))
    assert [tuple(table.write(column, row) for column in table.columns) for row in table.rows] == [
        ("rank 0", "cuda:0", "4.0 GiB", "6.0 GiB", "4", "forward > aten::mm"),
    ]


def test_the_peak_of_memory_has_an_operator_if_only_operators_have_text_as_thread(tmp_path):
    """As in traces of torch 1.9."""
    events = [annotation("ProfilerStep#4", 0, 100, tid="1"), event("cpu_op", "aten::mm", 12, 20, tid="1")]
    events += [*launch(1, 10, "a", 20, 5, tid="1"), allocation(15, 4 << 30, 5 << 30, (1, 0), tid=1)]
    (memory,) = read_rank(write(tmp_path / "rank0.json", events)).memory
    assert memory.callers == "aten::mm"


def test_the_peak_of_memory_is_compared_with_the_memory_of_the_device(tmp_path):
    path = write(tmp_path / "rank0.json", recording())
    properties = [{"name": "A", "totalGlobalMem": 80 << 30}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"deviceProperties": properties}))
    assert dict(details(read_capture(path.parent)))["memory of the device"] == "at most 4.0 GiB of 80.0 GiB"


def test_changes_of_the_memory_are_summed_up_if_a_trace_has_no_totals(tmp_path):
    """Traces of torch 1.9 have events without a category, and only the bytes of each change."""
    events = [annotation("ProfilerStep#4", 0, 100), *launch(1, 10, "a", 20, 5)]
    for at_us, change in ((5, 3 << 30), (15, -(1 << 30)), (20, 2 << 30), (90, -(4 << 30))):
        args = {"Device Type": 1, "Device Id": 0, "Bytes": change}
        events.append(event("", "[memory]", at_us, 0, **args) | {"ph": "i"})
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    said = "at most 4.0 GiB more than at the start of the recording"
    assert dict(details(capture))["memory of the device"] == said
    table = tables.memory(capture)
    assert [tuple(table.write(column, row) for column in table.columns[:4]) for row in table.rows] == [
        ("rank 0", "cuda:0, since the start", "4.0 GiB", "-")
    ]


def test_the_queue_contains_kernels_that_are_launched_and_not_started(tmp_path):
    trace = read_rank(write(tmp_path / "rank0.json", recording(), base_ns=0))
    assert (trace.launches.queue_median, trace.launches.queue_empty) == (1, pytest.approx(0.4))
    moments, lengths = trace.queue
    at = dict(zip([round(moment * 1e6) for moment in moments], lengths, strict=True))
    assert at == {0: 0, 10: 1, 20: 0, 30: 1, 50: 2, 60: 1, 80: 0, 100: 0}


def test_of_many_values_the_largest_are_kept(tmp_path):
    events = [annotation("ProfilerStep#0", 0, 10_000)]
    events += [allocation(at, 7 << 30 if at == 6789 else at) for at in range(10_000)]
    (memory,) = read_rank(write(tmp_path / "rank0.json", events)).memory
    moments, allocated, reserved = memory.curve
    assert len(moments) == len(allocated) == len(reserved) <= 1000
    assert (max(allocated), memory.allocated_bytes) == (7 << 30, 7 << 30)


def test_memory_and_queue_are_drawn_below_the_lanes(tmp_path):
    figure = timeline(read_capture(write(tmp_path / "rank0.json", recording()).parent)).figure
    lines = [one for one in figure["data"] if one["type"] == "scatter"]
    assert [(line["yaxis"], line["x"], line["y"]) for line in lines] == [
        ("y2", [0.005, 0.015, 0.02, 0.09], [2, 4, 4, 1]),
        ("y2", [0.005, 0.015, 0.02, 0.09], [3, 5, 6, 6]),
        ("y3", [0, 0.01, 0.02, 0.03, 0.05, 0.06, 0.08, 0.1], [0, 1, 0, 1, 2, 1, 0, 0]),
    ]
    assert figure["layout"]["yaxis2"]["domain"][0] >= figure["layout"]["yaxis3"]["domain"][1]
