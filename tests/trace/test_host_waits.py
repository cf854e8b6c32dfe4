"""What the host does while a device waits, and what delays a rank or makes steps unequal."""

import json

import pytest

from ddp_hpc.trace import tables
from ddp_hpc.trace.analysis_results import BEFORE
from ddp_hpc.trace.html_page import page
from ddp_hpc.trace.recorded import details
from ddp_hpc.trace.summarize_run import read_capture

from .made import annotation, event, launch, step, write
from .test_causes import RandomTrace

US = 1e-6


def _shown(table):
    return [tuple(table.write(column, row) for column in table.columns) for row in table.rows]


def _runtime(name, start_us, dur_us, tid=1):
    return event("cuda_runtime", name, start_us, dur_us, tid)


def recording():
    """Gaps of 3 ms in cudaFree, 4 ms in an operator of autograd's thread, and 2 ms outside of operators."""
    return [
        annotation("ProfilerStep#4", 0, 12_000),
        *launch(1, 0, "a", 500, 500),
        event("cpu_op", "aten::convolution", 1000, 3002),
        _runtime("cudaFree", 1000, 3000),
        *launch(2, 4000, "b", 4002, 998),
        annotation("backward", 5000, 4000),
        event("cpu_op", "autograd::engine::evaluate_function: MulBackward0", 5000, 4002, 2),
        *launch(3, 9000, "c", 9002, 998, tid=2),
        *launch(4, 11_998, "d", 12_000, 1),
    ]


def test_the_calls_and_operators_in_which_the_device_waits_are_named(tmp_path):
    capture = read_capture(write(tmp_path / "rank0.json", recording()).parent)
    assert _shown(tables.host_waits(capture)) == [
        ("autograd::engine::evaluate_function: MulBackward0", "33.3%", "1", "4.00"),
        ("cudaFree in aten::convolution", "25.0%", "1", "3.00"),
        ("Python, or code that was not recorded", "16.6%", "0", "2.00"),
    ]


def test_the_waits_of_random_programs_are_completely_attributed(tmp_path):
    for seed in range(4):
        made = RandomTrace(seed)
        for number in range(3):
            made.step(number)
        (trace,) = read_capture(write(tmp_path / f"{seed}" / "t.json", made.events)).ranks
        waited_s = sum(one.times.idle_host_s for one in trace.steps) / len(trace.steps)
        assert sum(wait.total_s for wait in trace.host_waits) / len(trace.steps) == pytest.approx(
            waited_s, rel=0.001
        ), seed


def test_an_annotation_inside_an_operator_is_named_as_well(tmp_path):
    events = [
        annotation("ProfilerStep#4", 0, 5000),
        *launch(1, 0, "a", 500, 500),
        *launch(2, 4000, "b", 4002, 998),
    ]
    events += [event("cpu_op", "c10d::allreduce_", 1000, 3000), annotation("nccl:all_reduce", 2000, 500)]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert [row[:2] for row in _shown(tables.host_waits(capture))] == [
        ("c10d::allreduce_", "50.0%"), ("nccl:all_reduce", "10.0%"),
    ]  # fmt: skip


def test_advice_is_given_for_the_blocking_call_that_takes_longest(tmp_path):
    events = [annotation("ProfilerStep#4", 0, 5000), *(one for one in recording()[1:] if one["ts"] < 5000)]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert any(
        "The host is in blocking calls for 3 ms (60%) of a step, of which 3 ms is cudaFree in "
        "aten::convolution. This call can wait until the device has finished everything: check whether the "
        "caching allocator" in text
        for text in capture.findings
    )


def test_calls_that_free_memory_can_be_a_sign_of_a_disabled_allocator(tmp_path):
    events = [
        annotation("ProfilerStep#4", 0, 5000),
        *launch(1, 0, "a", 0, 100),
        *launch(2, 4990, "b", 4995, 5),
    ]
    events += [_runtime("hipFree", 200 + 300 * number, 300) for number in range(12)]
    events += [event("cpu_op", f"op{number}", 200 + 600 * number, 600) for number in range(3)]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    (said,) = (text for text in capture.findings if "blocking calls" in text)
    assert "3.6 ms (72%) of a step, of which 1.8 ms is hipFree (6 times)" in said
    assert "PYTORCH_NO_HIP_MEMORY_CACHING" in said


def test_python_functions_in_which_the_device_waits_are_named(tmp_path):
    python = [event("python_function", name, at, dur) for name, at, dur in (
        ("main.py(1): step", 9000, 3000), ("<built-in method sort of list object at 0x7f>", 9200, 1500)
    )]  # fmt: skip
    capture = read_capture(write(tmp_path / "rank0.json", [*recording(), *python]).parent)
    assert (
        _shown(tables.host_waits(capture))[2:]
        == [
            ("<built-in method sort of list object>", "5.8%", "1", "0.70"),
            ("main.py(1): step", "10.8%", "1", "1.30"),
        ][::-1]
    )


def test_the_time_in_wrappers_of_a_function_is_that_of_the_function(tmp_path):
    """`call` spends nearly all of its time in `forward`, and `forward` a part of its time in an operator."""
    python = [event("python_function", name, at, dur) for name, at, dur in (
        ("train.py(3): main", 0, 2000), ("torch/nn/modules/module.py(9): call", 50, 900),
        ("model.py(7): forward", 60, 880),
    )]  # fmt: skip
    events = [annotation("ProfilerStep#1", 0, 2000), annotation("forward", 40, 1000), *python]
    events += [event("cpu_op", "aten::mm", 700, 200), *launch(1, 890, "sgemm", 900, 1100)]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert [row[:4:3] for row in _shown(tables.host_waits(capture))] == [
        ("model.py(7): forward", "0.65"),
        ("aten::mm", "0.19"),
        ("train.py(3): main", "0.04"),
        ("forward", "0.01"),
    ]


def test_what_would_help_most_is_named_in_order(tmp_path):
    capture = read_capture(write(tmp_path / "rank0.json", recording()).parent)
    assert capture.findings[1] == (
        "What would help most: a step of 12 ms would be shorter by at most 75% without late launches by the "
        "host (a bound: what the host does before them could take less time, or run in the background)."
    )
    events = [annotation("ProfilerStep#4", 0, 100), *launch(1, 0, "hgemm", 2, 98)]
    busy = read_capture(write(tmp_path / "busy" / "rank0.json", events).parent)
    assert busy.findings[1] == (
        "No avoidable wait of the device exceeds 5% of a step, so only less or faster computation "
        "would make it much shorter. The time of the kernels that compute is 100% matrix products; the "
        "longest of them, hgemm, takes 100%."
    )
    assert busy.findings[0].endswith("record several, for example with schedule(active=3).")


def test_kernels_that_could_be_shorter_are_named_unless_they_are_fused(tmp_path):
    """The gaps of 1.5 us between the kernels take 6% of the step."""
    pow_kernel = "void at::native::vectorized_elementwise_kernel<4, at::native::pow>"
    names = [pow_kernel, "triton_poi_fused_add_0", "hgemm", "sgemm"]
    events = [annotation("ProfilerStep#4", 0, 1000)]
    for number in range(40):
        events += launch(number + 1, number, names[number % 4], 1 + 25 * number, 23 + number % 4 / 4)
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert capture.findings[1] == (
        "What would help most: a step of 1 ms would be shorter by at most 24% without float32 products "
        "outside of Tensor or matrix cores (a bound: mixed precision uses these, and so does TF32 from "
        "NVIDIA's A100 on), 23% without "
        "elementwise kernels, copies and reductions (a bound: torch.compile or fused kernels join "
        "them). The time of the kernels that compute is 51% matrix products, 49% elementwise; the longest "
        "of them, sgemm, takes 25%."
    )


@pytest.mark.parametrize("has_steps", [True, False])
def test_only_a_wait_for_a_copy_is_compared_with_the_copies(tmp_path, has_steps):
    """Of 10 ms, the device only copies for 1 ms, while the host stands still, or waits for the copy."""
    step = [annotation("ProfilerStep#4", 0, 10_000)] * has_steps
    work = launch(1, 0, "gemm", 2, 9000)
    copy = event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 9002, 998, 7, correlation=2)
    call = event("cuda_runtime", "cudaMemcpyAsync", 4, 2, 1, correlation=2)
    still = [*step, *work, call, copy, event("cpu_op", "aten::sort", 10, 9980)]
    said = " ".join(read_capture(write(tmp_path / "still" / "rank0.json", still).parent).findings)
    assert "stands still" in said
    assert "only copies" not in said
    call = event("cuda_runtime", "cudaMemcpyAsync", 10, 9990, 1, correlation=2)
    waits = [*step, *work, event("cpu_op", "aten::copy_", 8, 9992), call, copy]
    said = " ".join(read_capture(write(tmp_path / "waits" / "rank0.json", waits).parent).findings)
    each = " per step" * has_steps
    assert f"has work meanwhile, but for 998 us{each}, only copies, without computation." in said


def test_what_runs_beside_a_collective_does_not_make_the_step_shorter(tmp_path):
    """Of 40 us of elementwise kernels, a collective runs during 30 us."""
    add = "void at::native::vectorized_elementwise_kernel<4, at::native::add>"
    events = [annotation("ProfilerStep#4", 0, 100), *launch(1, 0, add, 2, 40), *launch(2, 1, "gemm", 42, 58)]
    events.append(event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 12, 30, 9))
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert "at most 10% without elementwise kernels" in capture.findings[1]


def test_attention_in_several_kernels_is_found_by_the_shapes_of_its_scores(tmp_path):
    """Of 120 us, the two products and the softmax take 60 us; the other product is not of attention."""
    events = [annotation("ProfilerStep#4", 0, 120)]
    for number, (name, *dims) in enumerate((
        ("aten::bmm", [6, 5, 8], [6, 8, 7]),
        ("aten::_softmax", [2, 3, 5, 7]),
        ("aten::bmm", [6, 5, 7], [6, 7, 8]),
        ("aten::bmm", [6, 4, 8], [6, 8, 4]),
        ("aten::mm", [30, 8], [8, 8]),
        ("aten::_log_softmax", [30, 8]),
    )):  # fmt: skip
        events.append(event("cpu_op", name, 2 * number, 2, **{"Input Dims": dims}))
        events += launch(number + 1, 2 * number, "hgemm", 20 * number, 20)
    (_, text, *_) = read_capture(write(tmp_path / "rank0.json", events).parent).findings
    said = "50% without attention in several kernels (a bound: scaled_dot_product_attention has one)"
    assert said in text


@pytest.mark.parametrize(("wait_us", "said"), [(0, ""), (60, "12% without float32 products")])
def test_shorter_kernels_gain_at_most_the_time_in_which_the_host_waits_for_them(wait_us, said, tmp_path):
    """In each of 4 steps of 500 us, the host loads data for 200 us, and the device runs for 300 us."""
    events = []
    for number in range(4):
        at = 500 * number
        dims = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
        events += [annotation(f"ProfilerStep#{number}", at, 500), annotation("data", at, 200)]
        events += [event("cpu_op", "aten::mm", at + 200, 20, **dims)]
        events += launch(number + 1, at + 205, "volta_sgemm_128x64_nn", at + 210, 290)
        events += [event("cuda_runtime", "cudaStreamSynchronize", at + 400, wait_us)] * (wait_us > 0)
    said_of_help = next(
        text
        for text in read_capture(write(tmp_path / "rank0.json", events).parent).findings
        if text.startswith("What would help most")
    )
    assert "waiting for data" in said_of_help
    assert ("float32 products" in said_of_help) == bool(said)
    assert said in said_of_help


def test_communication_is_hidden_at_most_behind_the_computation_that_hides_none_yet(tmp_path):
    """A step of 100 us has 10 us of computation beside 100 us of communication."""
    events = [annotation("ProfilerStep#4", 0, 100), *launch(1, 0, "hgemm", 0, 10)]
    events += launch(2, 1, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 90)
    (_, text, *_) = read_capture(write(tmp_path / "rank0.json", events).parent).findings
    said = "(a bound: at most 10% fits behind computation, and the rest needs ranks that start it at the "
    assert f"90% without exposed communication {said}same time, or faster communication)" in text


def test_a_call_before_the_first_step_of_the_device_is_not_in_a_step(tmp_path):
    """Kernels that were launched before the recording end after 600 us, with a gap of 100 us between them."""
    events = [annotation("ProfilerStep#4", 0, 2000), _runtime("cudaDeviceSynchronize", 10, 600)]
    events += [event("kernel", "sgemm", at, 250, 7, correlation=at) for at in (0, 350)]
    events += launch(1000, 700, "hgemm", 710, 1290)
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert any(
        text == "Before the first step of the device, the host is in cudaDeviceSynchronize for 600 us: the "
        "device still runs earlier work, so this is not in a step."
        for text in capture.findings
    )
    assert not any("blocking calls" in text for text in capture.findings)
    (row,) = tables.blocking_calls(capture).rows
    assert (row["annotation"], row["idle_s"]) == (BEFORE, pytest.approx(110e-6))
    assert any(
        "28% of the device's busy time is before the first step, in work that the host had launched before"
        in note
        for note in capture.notes
    )


def test_one_long_wait_among_short_ones_is_not_because_of_many_launches(tmp_path):
    events = [annotation("ProfilerStep#4", 0, 3000), event("cpu_op", "aten::empty", 100, 2500)]
    for number, at in enumerate((0, 50, 2700, 2800, 2900)):
        events += launch(number + 1, at, "hgemm", at + 5, 20)
    said = " ".join(read_capture(write(tmp_path / "rank0.json", events).parent).findings)
    assert "once for 2.63 ms, longest in aten::empty (2.5 ms)." in said
    assert "CUDA graphs" not in said
    assert "fewer launches" not in said


def test_the_shortest_of_many_short_waits_are_one_row_without_a_name(tmp_path):
    """40 different operators, in each of which the device waits for 0.08 % of the step: in all, 3 %."""
    events = [annotation("ProfilerStep#4", 0, 10_000)]
    for number in range(40):
        events.append(event("cpu_op", f"aten::op{number}", 250 * number, 9))
        events += launch(number + 1, 250 * number + 8, "k", 250 * number + 8, 242)
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert [row[0] for row in _shown(tables.host_waits(capture))][24:] == ["aten::op24", "15 others"]
    assert capture.findings


def test_calls_in_which_the_host_waits_are_listed_with_what_is_around_them(tmp_path):
    def copy(number, at_us, dur_us, ran_us):
        call = event("cuda_runtime", "cudaMemcpyAsync", at_us, dur_us, correlation=number)
        return [call, event("gpu_memcpy", "Memcpy DtoH", ran_us, 10, 7, correlation=number)]

    events = [
        annotation("ProfilerStep#4", 0, 1000),
        annotation("forward", 100, 500),
        event("cpu_op", "aten::item", 100, 400),
        event("cpu_op", "aten::copy_", 110, 300),
        *copy(1, 120, 200, 300),  # returns after the copy
        *copy(2, 330, 10, 335),  # returns before it
        _runtime("cudaStreamSynchronize", 350, 50),
        event("cuda_driver", "cuStreamSynchronize", 360, 30),
        _runtime("cudaFreeAsync", 700, 50),
        _runtime("cudaMalloc", 800, 20),
        *launch(3, 900, "sgemm", 910, 600),
        _runtime("cudaDeviceSynchronize", 1010, 500),
        _runtime("cudaDeviceSynchronize", 1600, 700),
    ]
    for rank in range(2):
        write(tmp_path / f"r{rank}.json", events[: 14 + 2 * rank], rank, 2)
    assert [" ".join(row) for row in _shown(tables.blocking_calls(read_capture(tmp_path)))] == [
        "cudaDeviceSynchronize once, after the last step - 0.5 1 0.25 0.50 1 0.00 0 0.00",
        "cudaMemcpyAsync in aten::copy_ aten::item in forward DtoH 1 2 0.20 0.20 1 0.20 0 0.20",
        "cudaStreamSynchronize in aten::copy_ aten::item in forward DtoH 1 2 0.05 0.05 1 0.05 0 0.05",
        "cudaMalloc - - 1 2 0.02 0.02 1 0.02 0 0.02",
    ]


def test_a_copy_of_memory_that_is_not_pinned_blocks_the_host_in_its_call(tmp_path):
    """In old traces, the steps are operators."""
    events = [event("cpu_op", "ProfilerStep#4", 0, 1000), event("cpu_op", "ProfilerStep#5", 1000, 1000)]
    for number in range(2):
        at = 1000 * number
        events.append(event("cuda_runtime", "cudaMemcpyAsync", at, 50, correlation=number))
        copy = event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", at + 20, 40, 7, correlation=number)
        events += [event("cpu_op", "aten::copy_", at, 60), copy]
    (row,) = tables.blocking_calls(read_capture(write(tmp_path / "r0.json", events))).rows
    assert (row["call"], row["num_all"], row["total_s"]) == (
        "cudaMemcpyAsync in aten::copy_", 2, pytest.approx(50 * US),
    )  # fmt: skip


def test_a_first_step_that_is_cut_off_is_not_compared_with_the_others(tmp_path):
    events = [event("kernel", "of an earlier step", 0, 150, 7), *launch(0, -1, "of an earlier step", 0, 150)]
    for number, begin in enumerate((50, 200, 400, 650)):
        length = 250 if number == 2 else 200
        events += [annotation(f"ProfilerStep#{number}", begin, length)]
        events += launch(1 + number, begin + 5, "sgemm", max(begin + 10, 150), 50)
    (said,) = (
        text for text in read_capture(write(tmp_path / "r0.json", events)).findings if "longer" in text
    )
    assert "Step" in said


def test_a_first_step_before_which_the_device_was_idle_is_not_compared_with_the_others(tmp_path):
    """The device is 40 us behind the host after each step, so a step lasts 100 us, and the first one 140."""
    events = []
    for number in range(4):
        events += [annotation(f"ProfilerStep#{number}", 100 * number, 100)]
        events += launch(number, 100 * number + 30, "k", 100 * number + 60, 80)
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert not any("longer than the others" in sentence for sentence in capture.findings)
    assert [(row["name"], row["order"]) for row in tables.steps(capture).rows[:2]] == [
        ("step 0", "first: see Notes"),
        ("step 1", ""),
    ]
    assert any(note.startswith("step 0 is not compared with the others: ") for note in capture.notes)


def test_the_advice_on_a_copy_is_that_for_its_direction(tmp_path):
    def indexing(memory, more_us):
        call = event("cuda_runtime", "cudaMemcpyAsync", 220, 5, correlation=2)
        return [
            annotation("ProfilerStep#4", 0, 1000),
            *launch(1, 0, "sgemm", 2, 600),
            *(event("cpu_op", name, 200, 500) for name in ("aten::index", "aten::to", "aten::copy_")),
            call, event("gpu_memcpy", f"Memcpy {memory}", 602, 2, 7, correlation=2),
            _runtime("cudaStreamSynchronize", 230, 375),
            *launch(3, 900 + more_us, "sgemm", 910 + more_us, 90),
        ]  # fmt: skip

    for number, (memory, advice) in enumerate({
        "HtoD (Pageable -> Device)": "It copies a tensor from the host to the device after all earlier work",
        "DtoH (Device -> Pageable)": "It copies a result of the device to the host, as .item()",
        "DtoD": "If the program does not need to wait there, the host can launch more work in this time.",
    }.items()):  # fmt: skip
        path = write(tmp_path / f"{number}" / "rank0.json", indexing(memory, 0))
        (said,) = (text for text in read_capture(path).findings if "blocking calls" in text)
        assert (
            "cudaStreamSynchronize in aten::copy_ in aten::index, which waits for the copy "
            f"{memory}. {advice}"
        ) in said
        assert said.endswith("The device has nothing to do for at most 306 us because of this.")


def test_a_host_that_stands_still_without_a_call_is_named_with_its_annotation(tmp_path):
    """Autograd's thread works in the second half of `backward`, in which the main thread calls nothing."""
    events = [
        annotation("ProfilerStep#4", 0, 20_000),
        annotation("dispatch(F)", 0, 6000),
        *launch(1, 10, "sgemm", 20, 9000),
        event("cpu_op", "aten::empty", 5500, 10),
        annotation("backward", 6000, 14_000),
        *(event("cpu_op", "MmBackward0", 7000 + 500 * number, 500, 2) for number in range(26)),
        *launch(2, 7010, "sgemm", 9020, 8000, tid=2),
        annotation("enumerate(DataLoader)#_next", 20_000, 4000),
        annotation("ProfilerStep#5", 20_000, 4000),
    ]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert _shown(tables.blocking_calls(capture)) == [
        ("dispatch(F)", "-", "no call was recorded", "0.5", "1", "2.74", "0.00"),
        ("backward", "-", "no call was recorded", "0.5", "1", "0.50", "0.00"),
    ]
    assert (
        "The host stands still for 3.24 ms (27%) of a step: it waits or computes without a recorded call, "
        "for 2.74 ms of it, in dispatch(F). The device has work meanwhile, so this hardly makes a "
        "step longer."
    ) in capture.findings


def test_calls_are_listed_without_operators_and_steps(tmp_path):
    events = [*launch(1, 0, "a", 5, 50), _runtime("cudaFree", 10, 40)]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert _shown(tables.blocking_calls(capture)) == [("cudaFree", "-", "1", "0.04", "0.00")]


def test_the_rank_whose_host_takes_longest_is_the_first_by_its_regions(tmp_path):
    for rank, wait_us in enumerate((100, 300, 0)):
        own_us = 500 + 50 * (rank == 2)
        events = [
            annotation("ProfilerStep#4", 0, own_us + wait_us),
            annotation("forward", 0, 100 + wait_us),
            annotation("backward", 100 + wait_us, own_us - 100),
            *launch(1, 0, "sgemm", 10, 90 + wait_us),
            _runtime("cudaStreamSynchronize", 50, wait_us),
        ]
        write(tmp_path / f"r{rank}.json", events, rank, 3)
    assert _shown(tables.host_regions(read_capture(tmp_path))) == [
        ("rank 2", "0.00", "0.55", "0.00", "0.10", "0.45"),
        ("rank 0", "0.00", "0.50", "0.10", "0.20", "0.40"),
        ("rank 1", "0.00", "0.50", "0.30", "0.40", "0.40"),
    ]


def test_the_longest_gaps_are_listed_by_what_the_host_does(tmp_path):
    for rank in range(2):
        write(tmp_path / f"r{rank}.json", recording()[: 7 + 20 * rank], rank, 2)
    node = "autograd::engine::evaluate_function: MulBackward0"
    assert _shown(tables.gaps(read_capture(tmp_path))) == [
        ("Python, or code that was not recorded", "4", "10 ms", "7 ms", "0", "4", "5.00", "-"),
        ("cudaFree in aten::convolution", "2", "6 ms", "3 ms", "0", "4", "1.00", "b"),
        (node, "1", "4 ms", "4 ms", "1", "4", "5.00", "c"),
    ]


def test_a_late_start_of_the_step_is_not_a_loss_within_the_step(tmp_path):
    """Rank 2 begins 200 us late, 140 us later than the mean, and is 15 us late at a second collective."""
    nccl = {"Collective name": "allreduce", "In msg nelems": 4, "dtype": "Float", "Group size": 4}
    for rank in range(4):
        begin, second = (200, 415) if rank == 2 else (10 * rank, 400)
        events = [annotation("ProfilerStep#7", begin, 500 - begin)]
        for number, (start, end) in enumerate(((begin + 50, 300), (second, 450))):
            kernel = event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", start, end - start, 9, **nccl)
            events.append(kernel | {"args": nccl | {"correlation": number}})
            events.append(event("cuda_runtime", "cudaLaunchKernel", start - 1, 1, correlation=number))
        write(tmp_path / f"r{rank}.json", events, rank, 4)
    capture = read_capture(tmp_path)
    slow = capture.straggler
    assert (slow.rank, slow.before_s) == (2, pytest.approx(140 * US, abs=US))
    assert slow.share == 0, "its host works for less time than those of the others"
    assert any(
        "without different starts of the ranks, of which rank 2 is the last" in sentence
        for sentence in capture.findings
    )
    said = capture.findings[1]
    assert "140 us of this is due to different starts of the ranks: its host begins the step 200 us " in said
    assert "for a cause before this recording; it stays last, because the others do their host work" in said
    assert "does not explain" not in said


def test_two_slow_steps_with_different_causes_are_told_apart(tmp_path):
    events = [
        *step(1, 0),
        *step(2, 350),
        *step(3, 700, forward=900),
        *step(4, 1850, data=510),
        *step(5, 2700),
    ]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert capture.findings[1].startswith(
        "Steps 3, 4 take 650 us longer than the others on average: in step 3, 800 us is forward, and in "
        "step 4, 500 us is waiting for data. "
    )


def test_steps_of_different_lengths_are_reported_with_a_warning(tmp_path):
    events = [*step(1, 0), *step(2, 350), *step(3, 700, forward=900)]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert capture.findings[0].startswith(
        "A step takes 617 us on average (350 us to 1.15 ms, median 350 us): "
    )
    assert capture.findings[1] == (
        "Step 3 takes 800 us longer than the others: of the difference, 800 us is forward. "
        "If it took the median of the others (350 us), the mean step would be 43% shorter."
    )
    table = tables.steps(capture)
    shortest, _, slow, _ = table.rows
    assert (shortest["order"], slow["order"], slow["busy_s"]) == ("shortest", "longest", slow["step"])
    unknown = ["excess_s", "part_name", "part_s", "call", "call_s"]
    assert [table.write(column, shortest) for column in table.columns[3:8]] == ["-"] * 5
    assert [column.field for column in table.columns[3:8]] == unknown, "before the parts of the steps"
    assert (slow["name"], slow["part"], slow["call"]) == ("step 3", "forward_s", "aten::mm")
    assert (slow["excess_s"], slow["call_s"]) == (pytest.approx(800 * US), pytest.approx(800 * US))
    even = read_capture(write(tmp_path / "even" / "rank0.json", [*step(1, 0), *step(2, 350)]).parent)
    assert even.findings[0].startswith("A step takes 350 us: ")


def test_what_was_not_recorded_is_said(tmp_path):
    capture = read_capture(write(tmp_path / "rank0.json", recording()).parent)
    assert details(capture)[-4:] == [
        ("memory of the device", "not recorded (profile_memory=True)"),
        ("data loading on the host", "not recorded (no DataLoader, and no region named data)"),
        ("metadata of the trace", "backend gloo"),
        ("Python functions", "none recorded (with_stack=True records them)"),
    ]


def test_the_trace_says_what_it_knows_about_the_job(tmp_path):
    path = write(tmp_path / "rank0.json", [*recording(), event("python_function", "train.py(3): main", 0, 9)])
    document = json.loads(path.read_text())
    document |= {"traceName": "ep64_seqlen4096.json", "cuda_runtime_version": 12040, "with_stack": 1}
    document |= {"trace_id": "3F", "config": "tp1", "deviceProperties": []}
    path.write_text(json.dumps(document))
    assert details(read_capture(path))[-2:] == [
        ("name of the trace", "ep64_seqlen4096.json"),
        ("metadata of the trace", "cuda_runtime_version 12040, config tp1, backend gloo"),
    ]


def test_the_time_of_data_loading_is_that_of_the_host(tmp_path):
    """A kernel of the step before runs during most of the loading."""
    events = [annotation("ProfilerStep#1", 100, 100), annotation("enumerate(DataLoader)#_next", 100, 50)]
    events += [*launch(1, 0, "before", 10, 130), *launch(2, 160, "forward", 170, 30)]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert capture.mean.data_s == pytest.approx(10 * US)
    assert capture.ranks[0].host_s == {"data": pytest.approx(50 * US)}
    assert any("without waiting for data (attainable: more workers, or" in text for text in capture.findings)
    assert any(
        "cut off at its start on rank 0 (40 us): the device still" in text for text in capture.findings
    )


def test_a_page_of_one_rank_has_no_section_by_rank(tmp_path):
    assert "By rank" not in page([read_capture(write(tmp_path / "rank0.json", recording()).parent)], [])


def test_what_an_optimizer_does_while_the_device_waits_is_one_row_with_a_remedy(tmp_path):
    events = [annotation("ProfilerStep#4", 0, 1000), *launch(0, 0, "a", 1, 99)]
    events += [annotation("Optimizer.zero_grad#SGD.zero_grad", 100, 785)]
    events += [event("cpu_op", "aten::zero_", 100 + 200 * number, 183) for number in range(4)]
    for number in range(4):
        events += launch(1 + number, 280 + 200 * number, "fill", 282 + 200 * number, 5)
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    (row,) = _shown(tables.host_waits(capture))[:1]
    assert (row[0], row[2]) == ("Optimizer.zero_grad#SGD.zero_grad", "1")
    said = (
        "before the kernels of Optimizer.zero_grad#SGD.zero_grad: zero_grad(set_to_none=True) launches none."
    )
    assert any(sentence.endswith(said) for sentence in capture.findings)


@pytest.mark.parametrize(
    ("name", "advice"), [("AdamW", "foreach=True or fused=True in"), ("NAdam", "foreach=True in")]
)
def test_only_optimizers_with_a_fused_version_are_to_use_it(tmp_path, name, advice):
    events = [annotation("ProfilerStep#4", 0, 1000), *launch(0, 0, "a", 1, 9)]
    events += [annotation(f"Optimizer.step#{name}.step", 10, 980)]
    for number in range(40):
        events += launch(1 + number, 30 + 24 * number, "k", 32 + 24 * number, 2)
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    said = f"before the kernels of Optimizer.step#{name}.step: {advice} the optimizer launches fewer."
    assert any(sentence.endswith(said) for sentence in capture.findings)


def test_graphs_and_a_host_that_is_ahead_of_the_device_are_described(tmp_path):
    name = "execute_8_context_1(sq7)_generation_1(sq1)"
    events = [annotation(name, 0, 100), _runtime("cudaGraphLaunch", 10, 10) | {"args": {"correlation": 1}}]
    for number in range(9):
        kernel = event("kernel", "in_graph", 1000 + 100 * number, 100, 7, correlation=1)
        events.append(kernel | {"args": {"correlation": 1}})
    events += launch(2, 30, "attention", 1900, 100)
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert capture.findings[2:] == (
        "CUDA or HIP graphs (launched 1 time) run 9 of 10 kernels and copies, 90% of their time (attention "
        "takes longest outside: 100 us).",
        "The device limits the speed: its kernels start 1.42 ms (median) after their launch, and no call of "
        "the host waits for long; the first one starts after 980 us, probably behind "
        "earlier work.",
    )
    tokens = "8 tokens; requests in the context phase: 1, in generation: 1"
    assert dict(details(capture))["input of the first layer"] == tokens


def test_a_slow_collective_and_the_ranks_that_are_late_next_are_named(tmp_path):
    nccl = {"Collective name": "allreduce", "In msg nelems": 2**21, "dtype": "Float", "Group size": 4}
    for rank in range(4):
        events = [
            annotation("ProfilerStep#7", 8000 * (rank == 2), 23_000 - 8000 * (rank == 2)),
            annotation("backward", 8000, 3000 + 900 * (rank == 1)),
        ]
        begins = (9000 if rank == 2 else 1000, 20_900 if rank == 1 else 20_000)
        for number, (start, end) in enumerate(zip(begins, (12_000, 23_000), strict=True)):
            kernel = event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", start, end - start, 9)
            events.append(kernel | {"args": nccl | {"correlation": number}})
            events.append(event("cuda_runtime", "cudaLaunchKernel", start - 1, 1, correlation=number))
        events.append(_runtime("cudaStreamSynchronize", 2000, 10_001))
        write(tmp_path / f"r{rank}.json", events, rank, 4)
    capture = read_capture(tmp_path)
    said = " ".join(capture.findings)
    assert (
        "Next is rank 1 (675 us), on which the host takes at least 3.9 ms for backward, on the others at most"
        " 3 ms." in said
    )
    assert "is cudaStreamSynchronize, which waits for collectives that wait for rank 2 (7.5 ms)" in said
    assert "GB/s is slow between GPUs of one node" in said
    assert "of which 5.1 ms is the transfers, and the rest is waiting for other ranks" in said
