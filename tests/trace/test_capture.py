"""The analysis of synthetic traces."""

import json
from dataclasses import replace

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.trace import critical_path, kernel_tables
from ddp_hpc.trace import trace_files as files_module
from ddp_hpc.trace.findings import findings
from ddp_hpc.trace.recorded import about
from ddp_hpc.trace.summarize_run import read_capture
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
    capture = read_capture(_run(tmp_path))
    times, (row,) = capture.mean, capture.collectives
    assert (row.total_s, row.exposed_s) == (pytest.approx(3 * 90 * US), pytest.approx(3 * 40 * US))
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


def launch(number, start_us, tid=1):
    """A call of the runtime, of which kernel `number` is the result."""
    return event("cuda_runtime", "cudaLaunchKernel", start_us, 1, tid, correlation=number)


def kernel(number, name, start_us, dur_us, stream=9, cat="kernel", **more):
    return event(cat, name, start_us, dur_us, stream, correlation=number, **more)


NCCL = {"Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "Group size": 8}
NCCL |= {"dtype": "Float", "Process Group Name": "0"}
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
AUTOGRAD = 2  # a thread of its own


def device_step():
    """A step whose kernels run late: the host has passed on to the next region when they begin."""
    return [
        annotation("ProfilerStep#0", 0, 400),
        annotation("data", 0, 300),
        annotation("forward", 300, 10),
        launch(1, 302),
        annotation("backward", 310, 20),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 311, 5, AUTOGRAD),
        launch(2, 312, AUTOGRAD),
        launch(3, 318, AUTOGRAD),  # of DDP's hook, outside the operator
        annotation("Optimizer.step#SGD.step", 330, 10),
        launch(4, 331),
        launch(5, 335),
        # What Kineto makes of it: the main thread's annotations alone.
        event("gpu_user_annotation", "forward", 310, 200, 9),
        event("gpu_user_annotation", "Optimizer.step#SGD.step", 920, 50, 9),
        kernel(1, "gemm", 310, 200),
        kernel(2, "gemm", 510, 300),
        kernel(3, ALL_REDUCE, 710, 200, 10, **NCCL),
        kernel(4, "adam", 920, 50),
        kernel(5, "Memcpy DtoH (Device -> Pinned)", 960, 40, 11, "gpu_memcpy"),
        event("cpu_instant_event", "[memory]", 1, 0) | {"ph": "i"},
    ]


def test_a_kernel_belongs_to_the_region_that_launched_it(tmp_path):
    capture = read_capture(write(tmp_path / "t.json", device_step(), 3, 8))
    times = capture.mean
    assert times.data_s == pytest.approx(300 * US)
    assert times.forward_s == pytest.approx(200 * US)
    assert times.backward_s == pytest.approx(300 * US)
    assert times.optimizer_s == pytest.approx(50 * US)
    assert times.comm_hidden_s == pytest.approx(100 * US)
    assert times.comm_exposed_s == pytest.approx(100 * US)
    assert times.memcpy_s == pytest.approx(30 * US)
    assert times.idle_s == pytest.approx(20 * US)
    row = capture.collectives[0]
    assert (row.kind, row.bytes, row.num_ranks, row.group) == ("all_reduce", 4 << 20, 8, "0")
    assert row.busbw_bytes_per_s is None, "the other ranks are not known"
    assert (capture.ranks[0].device, kernel_tables.kernels(capture).rows[0]["num_calls"]) == ("cuda", 2)
    assert capture.missing == (0, 1, 2, 4, 5, 6, 7)


def test_passes_in_a_closure_of_the_optimizer_are_not_the_optimizer(tmp_path):
    """Lightning runs the forward and the backward pass inside of Optimizer.step."""
    host = [
        annotation("ProfilerStep#0", 0, 100),
        annotation("Optimizer.step#SGD.step", 10, 80),
        annotation("DistributedDataParallel.forward", 20, 20),
        event("cpu_op", "aten::mm", 20, 20),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 40, 30),
        event("cpu_op", "aten::add_", 75, 10),
    ]
    times = read_capture(write(tmp_path / "host.json", host)).mean
    assert (times.forward_s, times.backward_s) == (pytest.approx(20 * US), pytest.approx(30 * US))
    assert times.optimizer_s == pytest.approx(30 * US)  # 10 to 20, and 70 to 90
    device = [launch(1, 25), launch(2, 45), launch(3, 78)]
    device += [kernel(1, "gemm", 30, 20), kernel(2, "gemm", 50, 30), kernel(3, "sgd", 80, 15)]
    times = read_capture(write(tmp_path / "device.json", host + device)).mean
    assert (times.forward_s, times.backward_s) == (pytest.approx(20 * US), pytest.approx(30 * US))
    assert times.optimizer_s == pytest.approx(15 * US)


def test_the_last_step_lasts_until_the_device_has_finished_it(tmp_path):
    (step,) = read_capture(write(tmp_path / "t.json", device_step())).ranks[0].steps
    assert step.times.wall_s == pytest.approx(1000 * US), "the host's step ended after 400 us"


def test_a_step_of_a_device_that_is_behind_the_host_is_its_period(tmp_path):
    events = []
    for number in range(4):  # the host needs 100 us for a step, and the device 250
        events += [annotation(f"ProfilerStep#{number}", 100 * number, 100), launch(number, 100 * number + 5)]
        events += [kernel(number, "gemm", 10 + 250 * number, 250)]
    times = [one.times for one in read_capture(write(tmp_path / "t.json", events)).ranks[0].steps]
    assert [one.wall_s for one in times] == [pytest.approx(us * US) for us in (260, 250, 250, 250)]
    assert [one.other_s for one in times] == [pytest.approx(250 * US)] * 4


def test_kernels_are_computation_while_the_host_waits_for_data(tmp_path):
    events = [annotation("ProfilerStep#0", 0, 100), annotation("forward", 0, 10), launch(1, 1)]
    events += [annotation("data", 10, 90), kernel(1, "gemm", 20, 50)]
    times = read_capture(write(tmp_path / "t.json", events)).mean
    assert times.forward_s == pytest.approx(50 * US)
    assert times.data_s == pytest.approx(30 * US), "the first 10 us are after the launch"
    assert times.idle_kernel_s == pytest.approx(18 * US)


def test_idle_time_is_divided_by_cause(tmp_path):
    times = read_capture(write(tmp_path / "t.json", device_step())).mean
    assert times.idle_data_s == pytest.approx(300 * US), "nothing is launched while the host fetches data"
    assert times.idle_host_s == pytest.approx(2 * US), "from the end of the data to the launch in forward"
    assert times.idle_launch_s == pytest.approx(1 * US)
    assert times.idle_kernel_s == pytest.approx((7 + 10) * US), (
        "the optimizer's kernel is launched long before"
    )
    assert times.device_idle_s == pytest.approx(times.data_s + times.idle_s)


def test_a_gap_has_the_cause_of_the_event_that_ends_it(tmp_path):
    events = [annotation("ProfilerStep#0", 0, 100), annotation("snapshot", 60, 10)]
    events += [kernel(9, "gemm", 0, 10)]  # its launch was not recorded
    events += [launch(1, 5), kernel(1, "gemm", 12, 8), launch(2, 25), kernel(2, "gemm", 30, 20)]
    events += [kernel(8, "gemm", 54, 2), launch(3, 75), kernel(3, "gemm", 80, 5)]
    times = read_capture(write(tmp_path / "t.json", events)).mean
    assert times.idle_kernel_s == pytest.approx((2 + 4 + 4) * US)
    assert times.idle_launch_s == pytest.approx(2 * US)
    assert times.idle_other_s == pytest.approx(4 * US)
    assert times.idle_snapshot_s == times.snapshot_s == pytest.approx(10 * US)
    assert times.idle_host_s == pytest.approx((5 + 4 + 5 + 15) * US), "and until the end of the step"
    assert times.idle_s == pytest.approx((10 + 2 + 4 + 29) * US)


def test_a_host_without_a_device_has_no_causes_of_idle_time(tmp_path):
    times = read_capture(write(tmp_path / "t.json", [annotation("ProfilerStep#0", 0, 100)])).mean
    assert (times.idle_s, times.device_idle_s) == (pytest.approx(100 * US), 0)


def test_launches_are_counted_per_step_with_their_delays(tmp_path):
    events = []
    for number in range(2):
        at = 100 * number
        events += [annotation(f"ProfilerStep#{number}", at, 100)]
        events += [event("cuda_runtime", "cudaGraphLaunch", at, 10, correlation=10 * number + 1)]
        events += [kernel(10 * number + 1, "gemm", at + 14 + 20 * i, 20 - 15 * i) for i in range(2)]
        events += [event("cuda_runtime", "cudaLaunchKernel", at + 80, 6, correlation=10 * number + 2)]
        events += [kernel(10 * number + 2, "adam", at + 86, 4)]
    (trace,) = read_capture(write(tmp_path / "t.json", events)).ranks
    stats = trace.launches
    assert (stats.num_calls, stats.num_kernels, stats.num_short, stats.num_late) == (2, 3, 2, 2)
    assert stats.call_s == pytest.approx(8 * US)
    assert stats.delay_s == pytest.approx(2 * US), "of the first kernel of each call: 4 and 0 us"


def test_the_critical_path_of_one_rank_is_as_long_as_its_step(tmp_path):
    path = read_capture(write(tmp_path / "t.json", device_step())).path
    found = {(row.kind, row.name): row.dur_s for row in path.rows}
    assert found == {
        ("wait", "for data"): pytest.approx(300 * US),
        ("wait", "for a late launch (forward)"): pytest.approx(2 * US),
        ("wait", "in the launch call"): pytest.approx(1 * US),
        ("compute", "gemm"): pytest.approx(400 * US),  # the second one runs beside the collective
        ("communication", "all_reduce"): pytest.approx(200 * US),
        ("wait", "(kernel queued)"): pytest.approx(17 * US),
        ("compute", "adam"): pytest.approx(40 * US),  # until the copy starts
        ("memcpy", "Memcpy DtoH (Device -> Pinned)"): pytest.approx(40 * US),
    }
    assert path.total_s == pytest.approx(1000 * US)


def test_the_critical_path_continues_on_the_rank_that_starts_a_collective_last(tmp_path):
    for rank in range(2):
        long_us = 300 if rank else 100
        events = [annotation("ProfilerStep#0", 0, 20), launch(1, 0), launch(2, 5), launch(3, 10)]
        events += [kernel(1, f"gemm{rank}", 0, long_us), kernel(3, f"adam{rank}", 400, 100 - rank)]
        events += [kernel(2, ALL_REDUCE, long_us, 400 - long_us, 10, **NCCL | {"Group size": 2})]
        write(tmp_path / f"r{rank}.json", events, rank, 2)
    path = read_capture(tmp_path).path
    assert (path.begin_rank, path.end_rank) == (1, 0)
    assert {(row.rank, row.name): row.dur_s for row in path.rows} == {
        (1, "gemm1"): pytest.approx(300 * US),
        (1, "all_reduce"): pytest.approx(100 * US, abs=US),  # the starts on both ranks are times of day
        (0, "adam0"): pytest.approx(100 * US),
    }


def test_kernels_that_overlap_are_on_the_critical_path_one_after_the_other(tmp_path):
    events = [annotation("ProfilerStep#0", 0, 5), *(launch(i, i) for i in range(3))]
    events += [kernel(0, "a", 3, 47), kernel(1, "b", 45, 50), kernel(2, "c", 90, 10)]
    path = read_capture(write(tmp_path / "t.json", events)).path
    assert [(row.name, pytest.approx(row.dur_s)) for row in path.rows] == [
        ("a", 47 * US), ("b", 40 * US), ("c", 10 * US), ("(kernel queued)", 2 * US),
        ("in the launch call", 1 * US),
    ]  # fmt: skip


@pytest.mark.parametrize("limit", ["_MOST_EVENTS", "_MOST_COLLECTIVES", "_MOST_VISITS"])
def test_a_step_with_too_many_events_has_no_critical_path(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(critical_path, limit, 0)
    assert read_capture(write(tmp_path / "t.json", device_step(), 3, 8)).path is None


def test_most_kernels_of_a_long_critical_path_are_summed_up(tmp_path):
    events = [annotation("ProfilerStep#0", 0, 9000)]
    events += [kernel(i, f"kernel{i}", 10 * i, 10) for i in range(900)]
    path = read_capture(write(tmp_path / "t.json", events)).path
    assert (path.rows[0].name, path.rows[0].count, len(path.rows)) == ("other kernels", 400, 501)
    assert path.total_s == pytest.approx(9000 * US)


def test_kernels_without_a_launch_are_noted(tmp_path):
    events = [annotation("ProfilerStep#0", 0, 100), annotation("forward", 0, 100), kernel(9, "gemm", 0, 50)]
    events += [kernel(huge, "gemm", 50, 1) for huge in (2**63, 2**200, -(2**63))]
    events += [event("kernel", "gemm", 51, 1, correlation={"a": 1})]
    capture = read_capture(write(tmp_path / "t.json", events))
    assert (capture.mean.forward_s, capture.mean.other_s) == (0, pytest.approx(52 * US))
    assert any(
        "the launch of 100% of the kernels was not recorded, so their region is unknown" in note
        for note in capture.notes
    )


def test_a_device_that_was_not_recorded_is_noted_and_has_no_bandwidths(tmp_path):
    events = [annotation("ProfilerStep#0", 0, 100), launch(1, 1), annotation("nccl:all_reduce", 5, 10)]
    capture = read_capture(write(tmp_path / "t.json", events))
    assert capture.collectives == ()
    assert any("not the device's activity" in note for note in capture.notes)


def annotated(directory, calls, host="node1"):
    """One rank for each list of (collective, floats, start, end) of kernels, whose names and arguments say
    neither.
    """
    for rank, own in enumerate(calls):
        events = [annotation("ProfilerStep#0", 0, 400)]
        for number, (kind, num, start, end) in enumerate(own):
            dims = {"Input Dims": [[num]], "Input type": ["float"]}
            events += [annotation(f"nccl:{kind}", 10 * number, 5, **dims), launch(number, 10 * number + 1)]
            events.append(kernel(number, "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", start, end - start))
        write(directory / f"r{rank}.json", events, rank, len(calls), host)
    return read_capture(directory)


def test_the_kernels_of_nccls_all_to_all_are_matched_and_the_rank_that_is_late_is_named(tmp_path):
    """The ranks send different numbers of bytes."""
    late = [[("all_to_all", 100 + rank, 160 if rank == 2 else 100, 200)] for rank in range(4)]
    capture = annotated(tmp_path, late)
    assert [(row.kind, row.bytes) for row in capture.collectives] == [("all_to_all", 400)]
    assert capture.straggler.rank == 2
    assert "the last to start 1 of 1 collectives" in capture.straggler.evidence
    assert capture.straggler.excess_s == pytest.approx(60 * US)


def test_the_annotation_around_the_launch_says_what_a_kernel_of_nccl_does(tmp_path):
    calls = [("all_reduce", 1000, 100, 150), ("all_reduce", 10, 150, 160), ("_allgather_base", 50, 160, 170)]
    capture = annotated(tmp_path, [calls, calls])
    rows = [(row.kind, row.bytes, row.num_calls) for row in capture.collectives]
    assert rows == [("all_reduce", 4000, 1), ("all_reduce", 40, 1), ("all_gather", 2 * 200, 1)]
    assert capture.collectives[0].busbw_bytes_per_s == pytest.approx(4000 / (50 * US))


def test_a_few_slow_transfers_do_not_count_as_waiting(tmp_path):
    """Most calls take 10 us and one takes 200 us, and all ranks start each of them at the same time."""
    calls = [("all_reduce", 1000, start, start + 10) for start in (10, 30, 50)]
    capture = annotated(tmp_path, [[*calls, ("all_reduce", 1000, 100, 300)]] * 2)
    (row,) = capture.collectives
    assert row.transfer_s == pytest.approx(10 * US)
    assert row.transfers_s == pytest.approx(230 * US) == row.total_s
    assert "of which 230 us is the transfers; 0% of the communication" in " ".join(capture.findings)


def test_one_rank_does_not_wait_for_others_in_a_collective(tmp_path):
    calls = [("all_reduce", 1000, start, start + length) for start, length in ((10, 5), (30, 5), (50, 90))]
    said = " ".join(annotated(tmp_path, [calls]).findings)
    assert "Collectives take 100 us per step, of which 100 us is the transfers;" in said


def test_a_link_is_slow_only_between_ranks_that_can_share_a_node(tmp_path):
    capture = annotated(tmp_path, [[("all_reduce", 2**20, 10, 1000)]] * 2)
    first, second = capture.ranks
    one = "4.24 GB/s is slow between GPUs of one node, where"
    assert one in " ".join(findings(capture))
    unknown = replace(capture, ranks=(replace(first, host=""), replace(second, host="")))
    assert "4.24 GB/s is slow if all ranks are on one node, where" in " ".join(findings(unknown))
    apart = replace(capture, ranks=(first, replace(second, host="node2")))
    assert "GB/s is slow" not in " ".join(findings(apart))


def test_calls_that_end_before_others_begin_are_not_the_same_collective(tmp_path):
    """Of both ranks, the trace lacks another call, so that their numbers are equal."""
    first, second, third = (("all_reduce", 1000, start, start + 90) for start in (10, 130, 250))
    capture = annotated(tmp_path, [[first, second], [second, third]])
    (row,) = capture.collectives
    assert (row.num_calls, row.transfer_s, row.busbw_bytes_per_s) == (2, None, None)
    assert capture.straggler is None


@pytest.mark.parametrize(
    ("next_us", "said"), [(50, " shorter, since another rank is nearly as slow."), (0, " shorter.")]
)
def test_the_gain_without_a_late_rank_ends_at_the_next_latest(tmp_path, next_us, said):
    starts = [100, 100 + next_us, 160, 100]
    capture = annotated(tmp_path, [[("all_reduce", 1000, start, 200)] for start in starts])
    assert capture.straggler.rank == 2
    assert capture.straggler.share * capture.mean.wall_s == pytest.approx((60 - next_us) * US)
    assert said in capture.findings[1]


def test_the_gain_without_a_slow_rank_ends_at_the_next_slowest(tmp_path):
    slow = {"rank1": {"forward": 120, "wait": 20}, "rank2": {"forward": 140, "wait": 0}}
    capture = read_capture(_run(tmp_path, **slow))
    assert (capture.straggler.rank, capture.straggler.excess_s) == (2, pytest.approx(40 * US))
    assert capture.straggler.share * capture.mean.wall_s == pytest.approx(20 * US)


def test_a_slow_rank_costs_nothing_in_steps_in_which_another_one_is_slower(tmp_path):
    for rank in range(4):
        first = {"data": 70, "wait": 40} if rank == 1 else {"wait": 60 if rank == 2 else 100}
        forward = {"forward": 140 if rank == 2 else 100}
        events = [*step(2, 0, **forward, **first), *step(3, 800, **forward, wait=0 if rank == 2 else 40)]
        write(tmp_path / f"r{rank}.json", events, rank, 4)
    capture = read_capture(tmp_path)
    assert (capture.straggler.rank, capture.straggler.excess_s) == (2, pytest.approx(40 * US))
    assert capture.straggler.share * capture.mean.wall_s == pytest.approx(20 * US), "in one of two steps"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void two_shot_all_reduce_kernel<float>(...)", "all_reduce"),
        ("void deep_ep::internode::dispatch<false, 8>(...)", "all_to_all (dispatch)"),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "collective"),
    ],
)
def test_kernels_of_other_libraries_are_communication(tmp_path, name, kind):
    events = [annotation("ProfilerStep#0", 0, 100), kernel(1, name, 10, 50)]
    capture = read_capture(write(tmp_path / "t.json", events))
    assert [row.kind for row in capture.collectives] == [kind]
    assert (capture.mean.comm_exposed_s, capture.mean.other_s) == (pytest.approx(50 * US), 0)


@pytest.mark.check
def test_an_event_beyond_32_mib_and_blanks_beyond_32_mib_are_read(tmp_path):
    whole = write(tmp_path / "t.json", [annotation("ProfilerStep#0", 0, 100), annotation("forward", 0, 50)])
    begin, end = whole.read_text().split('"traceEvents": [')
    large = json.dumps(event("cpu_op", "aten::mm", 60, 10, blob="a" * (33 << 20)))
    whole.write_text(f'{begin}"traceEvents": [{large},{" " * (33 << 20)}{end}')
    times = read_capture(whole).mean
    assert (times.forward_s, times.other_s) == (pytest.approx(50 * US), pytest.approx(10 * US))


@pytest.mark.check
@pytest.mark.parametrize(
    "hostile",
    [
        annotation("gloo:all_reduce", 50, 10, 2, **{"Input Dims": [[10**400] * 9], "Input type": ["float"]}),
        annotation("ProfilerStep#" + "9" * 5000, 0, 350),
        event("kernel", "k", 5, 5, correlation=10**4000),
        annotation("forward", 5, 5, blob="a" * (33 << 20)),
    ],
    ids=["Input Dims", "step number", "correlation", "33 MiB"],
)
def test_a_hostile_event_does_not_affect_the_other_ranks(tmp_path, hostile):
    write(tmp_path / "r0.json", [*step(2, 0), hostile], 0, 2)
    write(tmp_path / "r1.json", step(2, 0), 1, 2)
    capture = read_capture(tmp_path)
    assert [trace.rank for trace in capture.ranks] == [0, 1]
    assert capture.rank_means[1].wall_s == pytest.approx(350 * US)


def test_events_that_are_nested_without_end_are_read_in_a_moment(tmp_path):
    events = [annotation("ProfilerStep#0", 0, 100), *[event("cpu_op", "aten::mm", 10, 5)] * 50_000]
    ops = read_capture(write(tmp_path / "t.json", events)).ranks[0].ops
    assert {op.name for op in ops} == {"ProfilerStep*", "aten::mm"}


def test_a_wait_for_each_rank_in_turn_has_no_straggler(tmp_path):
    for rank in range(4):
        events = [annotation("ProfilerStep#0", 0, 800)]
        for number in range(4):
            late_us = 60 if rank == number else 0
            events.append(kernel(number, ALL_REDUCE, 200 * number + late_us, 100 - late_us, 10, **NCCL))
        write(tmp_path / f"r{rank}.json", events, rank, 4)
    assert read_capture(tmp_path).straggler is None


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


def test_a_rank_that_is_slow_in_half_of_the_steps_is_not_named(tmp_path):
    for rank in range(4):
        late = [{"forward": 160, "wait": 0} if rank == 2 and number < 2 else {} for number in range(4)]
        events = [e for number in range(4) for e in step(number, 400.0 * number, **late[number])]
        write(tmp_path / f"r{rank}.json", events, rank, 4)
    assert read_capture(tmp_path).straggler is None


@pytest.mark.parametrize(
    ("starts", "steps"), [((0, 0, 0, 60_000), (0,)), ((0, 0, 0, 0), (0, 1, 2))], ids=["once", "network"]
)
def test_a_single_delay_and_a_slow_network_name_no_rank(tmp_path, starts, steps):
    """In a slow network, the calls of a collective begin together, but end at different times."""
    for rank, start in enumerate(starts):
        events = []
        for number in range(3):
            begun = 1e5 * number + (start if number in steps else 0)
            end = 1e5 * number + 70_000 + (20_000 if rank != 3 and number in steps and not start else 0)
            events += [annotation(f"ProfilerStep#{number}", 1e5 * number, end - 1e5 * number)]
            events += [all_reduce(begun, end - begun)]
        write(tmp_path / f"r{rank}.json", events, rank, 4)
    assert read_capture(tmp_path).straggler is None


def _in_a_ring(directory, late_ms, groups=(4,), hosts="aaaa", num_calls=6, late_calls=6):
    """Ranks of gloo that start an all_reduce together, and end the first `late_calls` at different times."""
    for rank, (ms, host) in enumerate(zip(late_ms, hosts, strict=True)):
        events = []
        for number in range(num_calls):
            end = 100_000 + (1000 * ms if number < late_calls else 0)
            events += [annotation(f"ProfilerStep#{number}", 4e5 * number, 4e5)]
            events += [all_reduce(4e5 * number, end, 1 << 20), all_reduce(4e5 * number + 1.5e5, 10 + rank)]
        config = [{"pg_size": size} for size in groups]
        write(directory / f"r{rank}.json", events, rank, len(hosts), host, pg_config=config)
    return read_capture(directory)


@pytest.mark.parametrize(
    ("late_ms", "pair"),
    [((0, 20, 10, 10), (2, 1)), ((20, 0, 0, 20.1), (0, 3)), ((20, 10, 10, 0), (1, 0))],
    ids=["sender", "both", "last rank"],
)
def test_the_slow_connection_of_a_ring_ends_at_the_rank_that_receives_last(tmp_path, late_ms, pair):
    capture = _in_a_ring(tmp_path, late_ms)
    connection = capture.slow_connection
    assert (connection.sender, connection.receiver) == pair
    assert (connection.num_last, connection.num_collectives) == (6, 6)
    assert capture.straggler is None
    assert f"The connection from rank {pair[0]} to rank {pair[1]} is slow: " in capture.findings[1]


@pytest.mark.parametrize(
    "ring",
    [
        {"late_ms": (0, 0, 0, 0)},
        {"late_ms": (0, 5, 0, 0)},
        {"late_ms": (0, 20, 0, 0), "late_calls": 3},
        {"late_ms": (0, 20, 0, 0), "num_calls": 4},
        {"late_ms": (0, 20, 0, 0), "groups": (4, 2)},
    ],
    ids=["even", "less than half of a chunk", "half of the calls", "few calls", "groups of some ranks"],
)
def test_no_connection_is_named_without_evidence(tmp_path, ring):
    capture = _in_a_ring(tmp_path, **ring)
    assert capture.slow_connection is None
    assert any("do not show whether a connection is slow" in sentence for sentence in capture.findings)


def test_a_slow_connection_between_hosts_is_not_mistaken_for_a_clock(tmp_path):
    capture = _in_a_ring(tmp_path, (0, 20, 10, 10), hosts="abcd")
    assert (capture.slow_connection.receiver, capture.notes) == (1, ())
    assert (
        "Check the network of both ranks on c and b, unless the clock of b is ahead." in capture.findings[1]
    )


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
    assert dict(about(capture))["ranks"] == "3 of 4", "the note says which ones"
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


@pytest.mark.parametrize(
    ("apart_s", "note"), [(1, "is a recording of the same process"), (1000, "from another run")]
)
def test_two_recordings_of_one_process_are_not_two_ranks(tmp_path, apart_s, note):
    write(tmp_path / "node1_7.1.pt.trace.json", step(1, 0), None)
    write(tmp_path / "node1_7.2.pt.trace.json", step(9, apart_s * 1e6), None)
    capture = read_capture(tmp_path)
    assert [trace.rank for trace in capture.ranks] == [0]
    assert any(note in text for text in capture.notes)


@pytest.mark.parametrize("other", [{"start_us": 100}, {"start_us": 1000, "host": "node2"}])
def test_recordings_at_the_same_time_or_on_other_hosts_are_two_ranks(tmp_path, other):
    write(tmp_path / "a.json", step(1, 0), None)
    write(tmp_path / "b.json", step(1, other.pop("start_us")), None, **other)
    assert [trace.rank for trace in read_capture(tmp_path).ranks] == [0, 1]


def test_a_cut_off_trace_is_named_in_a_warning(tmp_path):
    _run(tmp_path, size=2)
    assert read_capture(tmp_path).warnings == ()
    whole = write(tmp_path / "r2.json", step(2, 0), 2, 3).read_bytes()
    (tmp_path / "r2.json").write_bytes(whole[:-20])
    assert read_capture(tmp_path / "r2.json").warnings == (
        "Warning: cut off, so that the times after the cut are missing: r2.json (1 of 1 traces).",
    )
    packed = (tmp_path / "rank00001-of-00002.json.gz").read_bytes()
    (tmp_path / "rank00001-of-00002.json.gz").write_bytes(packed[:-20])
    (tmp_path / "r2.json").unlink()
    assert read_capture(tmp_path).warnings == (
        "Warning: cut off, so that the times after the cut are missing: "
        "rank00001-of-00002.json.gz (1 of 2 traces).",
    )
    (tmp_path / "rank00001-of-00002.json.gz").write_bytes(packed[:100])
    assert "(1 of 2 traces)" in read_capture(tmp_path).warnings[0], "although nothing can be used"


def test_a_few_long_waits_for_the_host_are_told_from_many_short_ones(tmp_path):
    events = [annotation("ProfilerStep#0", 0, 5e4), launch(1, 10), launch(2, 40_000)]
    events += [kernel(1, "gemm", 20, 10), kernel(2, "gemm", 45_000, 5_000)]
    findings = " ".join(read_capture(write(tmp_path / "t.json", events)).findings)
    assert "The device waits for the host 2 times per step, once for 40 ms." in findings
    assert "CUDA graphs" not in findings


def test_one_rank_of_many_does_not_tell_waiting_from_transfer(tmp_path):
    capture = read_capture(write(tmp_path / "t.json", device_step(), 3, 8))
    assert "waiting for other ranks cannot be separated from the transfer" in " ".join(capture.findings)
    assert any(note.startswith("only one rank's trace was given") for note in capture.notes)
    assert capture.collectives[0].transfer_s is None


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
        {"distributedInfo": {"rank": "3", "world_size": None}},
        {"baseTimeNanoseconds": 10**400, "host_name": 7},
    ],
)
def test_invalid_metadata_is_ignored(tmp_path, head):
    (tmp_path / "t.json").write_text(json.dumps({**head, "traceEvents": step(1, 0)}))
    capture = read_capture(tmp_path)
    assert (capture.world_size, capture.missing, capture.ranks[0].rank) == (1, (), 0)
    assert capture.mean.wall_s == pytest.approx(350 * US)
