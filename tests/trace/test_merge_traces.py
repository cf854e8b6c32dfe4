"""The merged trace of all ranks for Perfetto: `ddp-hpc report --perfetto`."""

import gzip
import json

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.trace.merge_traces import write_merged
from ddp_hpc.trace.report_files import check_outputs
from ddp_hpc.trace.summarize_run import read_capture

from .made import BASE_NS, annotation, event, launch, step, write


def merged(directory, target):
    write_merged(target, read_capture(directory).ranks)
    return json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]


def flow(number, at_us):
    return [
        {"ph": "s", "id": number, "pid": 7, "tid": 1, "ts": at_us, "cat": "ac2g", "name": "ac2g"},
        {
            "ph": "f",
            "id": number,
            "pid": 7,
            "tid": 9,
            "ts": at_us + 1,
            "cat": "ac2g",
            "name": "ac2g",
            "bp": "e",
        },
    ]


def metadata(kind, **args):
    return {"ph": "M", "name": kind, "pid": 7, "tid": 1, "ts": 0, "args": args}


def test_all_events_are_kept_with_ids_that_are_unique_across_ranks(tmp_path):
    for rank in range(2):
        events = [
            annotation("ProfilerStep#1", 0, 90),
            event("cpu_op", "aten::mm", 10, 50, **{"Input Dims": [[3]]}),
        ]
        events += [*launch(5, 20, "sgemm", 40, 8), *flow(5, 20), metadata("process_name", name="python")]
        events += [
            metadata("process_labels", labels="GPU 0"),
            metadata("process_sort_index", sort_index=7),
            {**event("Trace", "x", 0, 1), "pid": "Spans"},
        ]
        write(tmp_path / "in" / f"rank{rank}.json", events, rank, 2)
    events = merged(tmp_path / "in", tmp_path / "all.json.gz")
    assert len(events) == 2 * 10
    (first, second) = (events[:10], events[10:])
    for field in ("pid", "tid"):
        assert not {event[field] for event in first} & {event[field] for event in second}
        assert all(0 < event[field] < 2**31 for event in events)
    flows = [[event["id"] for event in of_rank if event["ph"] in "sf"] for of_rank in (first, second)]
    assert flows[0] == [flows[0][0]] * 2 != flows[1] == [flows[1][0]] * 2
    names = [event["args"] for event in events if event["name"] == "process_name"]
    assert names == [{"name": f"rank {rank}: {name}"} for rank in range(2) for name in ("python", "GPU 0")]
    sorts = [event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"]
    assert sorts == [of_rank[0]["pid"] for of_rank in (first, second)]
    (operator, _) = (event for event in events if event["name"] == "aten::mm")
    assert (operator["args"], operator["dur"], operator["cat"]) == ({"Input Dims": [[3]]}, 50, "cpu_op")


def test_times_are_on_the_corrected_clock(tmp_path):
    # The clock of node2 is 2 s ahead, and its profiler has begun 300 us later.
    for rank, (host, base_ns) in enumerate([("node1", BASE_NS), ("node2", BASE_NS + 2_000_300_000)]):
        events = [e for i in range(3) for e in step(i + 2, 1000.0 * i + (0 if rank == 0 else -300))]
        write(tmp_path / "in" / f"rank{rank}.json", events, rank, 2, host, base_ns)
    starts = [event["ts"] for event in merged(tmp_path / "in", tmp_path / "all.json.gz")]
    assert starts[len(starts) // 2 :] == pytest.approx(starts[: len(starts) // 2], abs=1)


def test_perfetto_can_read_all_ids_and_times(tmp_path):
    """Perfetto rejects integers above 2**63, and would draw flows with the same ID between ranks."""
    for rank in range(2):
        events = [annotation("ProfilerStep#1", 1_700_000_000_000_000, 90)]
        events += [{**one, "id": number} for number in (2**63, "0x1a", 5) for one in flow(1, 5.125)]
        events += [{"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 90}]
        write(tmp_path / "in" / f"rank{rank}.json", events, rank, 2, base_ns=BASE_NS + 1001 * rank)
    events = merged(tmp_path / "in", tmp_path / "all.json.gz")
    flows = [event["id"] for event in events if event["ph"] == "s"]
    assert len({*flows}) == 6
    assert all(isinstance(number, int) and 0 <= number < 2**63 for number in flows)
    assert [event["id"] for event in events if event["ph"] == "f"] == flows
    # A fraction of a microsecond could not be added to times since 1970.
    starts = [event["ts"] for event in events if event["name"] == "ProfilerStep#1"]
    assert starts == [1_700_000_000_000_000, 1_700_000_000_000_001]
    assert all(isinstance(start, int) for start in starts)
    assert {event["s"] for event in events if event["ph"] == "i"} == {"p"}


def test_only_earlier_merged_traces_are_overwritten(tmp_path):
    write(tmp_path / "in" / "rank0.json", step(1, 0))
    target = tmp_path / "all.json.gz"
    merged(tmp_path / "in", target)
    check_outputs(None, None, target)
    target.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(RequestError, match="was not written by this option"):
        check_outputs(None, None, target)
    with pytest.raises(RequestError, match=r"ends in \.json\.gz"):
        check_outputs(None, None, tmp_path / "all.json")
