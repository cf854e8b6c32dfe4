"""The analysis of synthetic traces."""

import json

import pytest

from ddp_hpc.errors import RequestError
from ddp_hpc.trace import trace_files as files_module
from ddp_hpc.trace.capture import read_capture
from tests.trace.made import all_reduce, annotation, event, step, write

US = 1e-6


def _run(directory, size=4, **slow):
    """A run of several ranks and three steps of 350 us; `slow` sets forward and wait of single ranks."""
    for rank in range(size):
        own = slow.get(f"rank{rank}", {})
        events = [e for i in range(3) for e in step(i + 2, 350.0 * i, **own)]
        write(directory / f"rank{rank:05d}-of-{size:05d}.json.gz", events, rank, size)
    return directory


def test_the_parts_of_a_step_equal_a_calculation_by_hand(tmp_path):
    times = read_capture(_run(tmp_path)).mean
    assert times.data_s == pytest.approx(10 * US)
    assert times.forward_s == pytest.approx(100 * US)
    assert times.backward_s == pytest.approx(200 * US)
    assert times.comm_exposed_s == pytest.approx(40 * US)
    assert times.comm_hidden_s == pytest.approx(50 * US)
    assert times.wall_s == pytest.approx(350 * US)
    assert (times.optimizer_s, times.other_s, times.idle_s) == (0, 0, pytest.approx(0, abs=1e-12))


def test_time_without_events_is_idle_and_computation_outside_regions_is_other(tmp_path):
    events = [
        annotation("ProfilerStep#0", 0, 100),
        annotation("forward", 0, 40),
        event("cpu_op", "aten::add", 50, 20),
    ]
    times = read_capture(write(tmp_path / "t.json", events)).mean
    assert times.forward_s == pytest.approx(40 * US)
    assert times.other_s == pytest.approx(20 * US)
    assert times.idle_s == pytest.approx(40 * US)


def test_on_a_device_kernels_and_waiting_for_data_are_counted(tmp_path):
    events = [
        annotation("ProfilerStep#0", 0, 1000),
        annotation("data", 0, 300),
        annotation("forward", 300, 10),
        event("gpu_user_annotation", "forward", 310, 200, 9),
        event("gpu_user_annotation", "backward", 510, 300, 9),
        event("kernel", "gemm", 310, 200, 9),
        event("kernel", "gemm", 510, 300, 9),
        event(
            "kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 710, 200, 10,
            **{"Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20,
               "Group size": 8, "dtype": "Float", "Process Group Name": "0"},
        ),
        event("kernel", "ncclDevKernel_Generic(ncclDevComm*)", 905, 5, 10),
        event("cpu_instant_event", "[memory]", 1, 0) | {"ph": "i"},
    ]  # fmt: skip
    capture = read_capture(write(tmp_path / "t.json", events, 3, 8))
    times = capture.mean
    assert times.data_s == pytest.approx(300 * US)
    assert times.forward_s == pytest.approx(200 * US)
    assert times.backward_s == pytest.approx(300 * US)
    assert times.comm_hidden_s == pytest.approx(100 * US)
    assert times.comm_exposed_s == pytest.approx(100 * US)
    assert times.idle_s == pytest.approx(100 * US)
    row = capture.collectives[0]
    assert (row.kind, row.bytes, row.num_ranks, row.group) == ("all_reduce", 4 << 20, 8, "0")
    assert row.busbw_bytes_per_s == pytest.approx(2 * 7 / 8 * (4 << 20) / (200 * US))
    assert (capture.ranks[0].device, capture.ranks[0].kernels[0].num_calls) == ("cuda", 2)
    assert capture.missing == (0, 1, 2, 4, 5, 6, 7)


def test_a_slow_rank_is_found_and_a_single_slow_step_is_ignored(tmp_path):
    slow = read_capture(_run(tmp_path / "slow", rank2={"forward": 130, "wait": 10})).straggler
    assert (slow.rank, slow.region) == (2, "forward")
    assert slow.excess_s == pytest.approx(30 * US)
    assert "it was the last to start 3 of 3 collectives" in slow.evidence
    assert read_capture(_run(tmp_path / "even")).straggler is None
    once = _run(tmp_path / "once")
    events = [*step(2, 0, forward=130, wait=10), *step(3, 350), *step(4, 700)]
    write(once / "rank00002-of-00004.json.gz", events, 2, 4)
    assert read_capture(once).straggler is None


def test_the_transfer_time_is_that_of_the_rank_that_started_last(tmp_path):
    row = read_capture(_run(tmp_path, rank2={"forward": 130, "wait": 10})).collectives[0]
    assert row.median_s == pytest.approx(90 * US)
    assert row.transfer_s == pytest.approx(60 * US)
    assert (row.bytes, row.num_calls, row.busbw_bytes_per_s) == (
        4000,
        3,
        pytest.approx(1.5 * 4000 / (60 * US)),
    )


def test_a_trace_with_the_region_names_of_torch_is_analyzed(tmp_path):
    events = [
        annotation("ProfilerStep#5", 0, 1000),
        annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 100),
        annotation("DistributedDataParallel.forward", 100, 200),
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 400, 100),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 550, 150),
        annotation("Optimizer.step#Adam.step", 800, 150),
    ]
    times = read_capture(write(tmp_path / "host_123.pt.trace.json", events, None)).mean
    found = [times.data_s, times.forward_s, times.backward_s, times.optimizer_s, times.idle_s]
    assert found == [pytest.approx(us * US) for us in (100, 200, 300, 150, 250)]


def test_without_steps_the_whole_recording_is_one_step(tmp_path):
    capture = read_capture(
        write(tmp_path / "t.json", [annotation("forward", 5, 10), annotation("data", 20, 5)])
    )
    assert capture.mean.wall_s == pytest.approx(20 * US)
    assert "profiler.step() was not called" in capture.notes[0]


def test_clocks_of_other_hosts_are_corrected_with_collectives(tmp_path):
    for rank in range(4):
        events = [e for i in range(3) for e in step(i + 2, 1e6 * i + (5e4 if rank > 1 else 0))]
        write(tmp_path / f"r{rank}.json", events, rank, 4, host="node1" if rank < 2 else "node2")
    capture = read_capture(tmp_path)
    starts = {round(trace.steps[0].start_s, 6) for trace in capture.ranks}
    assert len(starts) == 1
    assert capture.notes == (
        "the clock of node2 is 50.0 ms ahead of that of node1 (measured by 6 collectives); "
        "its times were corrected",
    )


def test_a_missing_rank_is_reported_and_the_others_are_analyzed(tmp_path):
    (_run(tmp_path) / "rank00001-of-00004.json.gz").unlink()
    capture = read_capture(tmp_path)
    assert (capture.missing, len(capture.ranks)) == ((1,), 3)
    assert "traces of 1 of 4 ranks are missing: 1" in capture.notes
    assert capture.collectives[0].num_calls == 3


def test_of_mixed_runs_the_one_with_most_ranks_is_reported(tmp_path):
    _run(tmp_path)
    write(tmp_path / "old.json", step(1, 0), 0, 2)
    write(tmp_path / "older.json", step(1, 0), 3, 4, base_ns=1_690_000_000_000_000_000)
    capture = read_capture(tmp_path)
    assert len(capture.ranks) == 4
    assert "old.json: skipped: from another run of 2 ranks, 0 s apart" in capture.notes
    assert any(note.startswith("older.json: skipped: from another run of 4 ranks") for note in capture.notes)


def test_a_second_recording_of_a_rank_is_skipped_with_a_note(tmp_path):
    _run(tmp_path, size=1)
    write(tmp_path / "rank00000-of-00001-2.json.gz", step(9, 5000), 0, 1)
    capture = read_capture(tmp_path)
    assert [one.number for one in capture.ranks[0].steps] == [2, 3, 4]
    assert capture.notes == (
        "rank00000-of-00001-2.json.gz: skipped: rank 0 already has rank00000-of-00001.json.gz "
        "of the same run",
    )


def test_ranks_come_from_file_names_or_are_numbered(tmp_path):
    write(tmp_path / "torch-trace-1-of-2.json", step(1, 0), None)
    write(tmp_path / "torch-trace-0-of-2.json", step(1, 0), None)
    assert [trace.rank for trace in read_capture(tmp_path).ranks] == [0, 1]
    write(tmp_path / "x" / "some.json", step(1, 0), None)
    capture = read_capture(tmp_path / "x")
    assert capture.notes == ("some.json: no rank in the trace or the file name; treated as rank 0",)


def test_files_that_are_not_traces_are_skipped_with_a_note(tmp_path):
    _run(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "away.json").symlink_to(tmp_path / "gone")
    notes = read_capture(tmp_path).notes
    assert notes == (
        "empty.json: skipped: the file is empty",
        "summary.json: skipped: no traceEvents found",
    )


def test_several_processes_give_the_same_result_as_one(tmp_path, monkeypatch):
    _run(tmp_path, size=6)
    alone = read_capture(tmp_path, num_processes=1)
    monkeypatch.setattr(files_module, "_SMALL_BYTES", 0)
    assert read_capture(tmp_path, num_processes=3) == alone


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: f / "nothing", "no such directory"),
        (lambda f: f, "no traces"),
        (lambda f: write(f / "deep" / "a.json", []).parent.parent, "found some in"),
        (lambda f: write(f / "a.json", []), "no usable trace; a.json: skipped"),
    ],
)
def test_a_directory_without_usable_traces_is_an_error(tmp_path, make, message):
    with pytest.raises(RequestError, match=message):
        read_capture(make(tmp_path))


def test_absurd_times_are_harmless(tmp_path):
    events = [
        *step(1, 0),
        annotation("forward", 1e300, 1e300),
        annotation("forward", -1e300, -5),
        all_reduce(1e18, 1e18, num_floats=10**15),
        event("kernel", "k", 0, 0) | {"pid": None, "tid": [1]},
        {"ph": "X"},
    ]
    capture = read_capture(write(tmp_path / "t.json", events))
    assert capture.mean.wall_s == pytest.approx(350 * US)


@pytest.mark.parametrize(
    "head",
    [
        {"distributedInfo": {"rank": 10**11, "world_size": 10**11}},
        {"distributedInfo": {"rank": -7, "world_size": 2}},
        {"distributedInfo": {"rank": "3", "world_size": None}},
        {"distributedInfo": [1]},
        {"baseTimeNanoseconds": 10**400},
        {"baseTimeNanoseconds": 1e300, "host_name": 7},
    ],
)
def test_invalid_metadata_is_ignored(tmp_path, head):
    (tmp_path / "t.json").write_text(json.dumps({**head, "traceEvents": step(1, 0)}))
    capture = read_capture(tmp_path)
    assert (capture.world_size, capture.missing, capture.ranks[0].rank) == (1, (), 0)
    assert capture.mean.wall_s == pytest.approx(350 * US)


def test_absurd_step_numbers_and_sizes_are_harmless(tmp_path):
    dims = {"Input Dims": [[10**19, 10**19]], "Input type": ["float"]}
    events = [
        *step(10**25, 0),
        annotation("gloo:all_reduce", 0, 5, 2, **dims),
        annotation("gloo:all_reduce", 9, 5, 2, **{"Input Dims": [[-1, None], 3], "Input type": [5, "float"]}),
    ]
    capture = read_capture(write(tmp_path / "t.json", events))
    assert capture.mean.wall_s == pytest.approx(350 * US)
