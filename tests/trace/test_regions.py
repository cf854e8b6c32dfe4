"""What the host and the device do in annotations and modules: by hand, and recorded."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from ddp_hpc.trace import tables
from ddp_hpc.trace.analyze_rank import read_rank
from ddp_hpc.trace.event_names import region_of_event
from ddp_hpc.trace.region_times import RECOMPUTED
from ddp_hpc.trace.summarize_run import read_capture
from tests.trace.made import annotation, event, launch, write

US = 1e-6
NODE = "autograd::engine::evaluate_function: MulBackward0"


def module(name, start_us, dur_us, tid=1):
    return event("python_function", f"nn.Module: {name}", start_us, dur_us, tid)


def regions_of(path):
    return {region.name: region for region in read_rank(path).regions}


def pipeline():
    """A step whose regions name their phase; a thread of autograd launches two kernels during attn(B)."""
    return [
        annotation("ProfilerStep#1", 0, 1000),
        annotation("1F1B", 0, 1000),
        annotation("attn(F)", 10, 100),
        *launch(1, 20, "gemm", 30, 50),
        annotation("attn(B)", 200, 200),
        event("cpu_op", NODE, 210, 50, 2),
        *launch(2, 220, "gemm", 230, 60, 2),
        *launch(3, 270, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 300, 40, 2),  # of a hook
        annotation("attn(W)", 500, 50),
        *launch(4, 510, "gemm", 520, 30),
    ]


@pytest.mark.parametrize(
    ("name", "region"),
    [
        ("attn(F)", "forward"),
        ("mlp(W)", "backward"),
        ("PP:0F3", "forward"),
        ("PP:1W0", "backward"),
        ("Backward 3", "backward"),
        ("FSDP::pre_forward (layers.0)", "forward"),
        ("1F1B", ""),
        ("forward-backward", ""),
        ("feed_forwarding", ""),
    ],
)
def test_the_name_of_an_annotation_tells_its_phase(name, region):
    assert region_of_event("user_annotation", name) == region


def test_kernels_of_autograds_threads_are_in_the_region_that_called_backward(tmp_path):
    path = write(tmp_path / "rank0.json", pipeline())
    regions, trace = regions_of(path), read_rank(path)
    assert regions["attn(B)"].device_s == pytest.approx(60 * US)
    assert (regions["attn(B)"].num_kernels, regions["attn(B)"].comm_s) == (2, pytest.approx(40 * US))
    assert regions["attn(B)"].idle_s == pytest.approx((150 + 10) * US)
    assert regions["1F1B"].device_s == pytest.approx(140 * US)
    assert regions["attn(F)"].total_s == pytest.approx(100 * US)
    assert [round(trace.steps[0].times.forward_s / US), round(trace.steps[0].times.backward_s / US)] == [
        50,
        90,
    ]
    assert not any("not annotated" in note for note in trace.notes)


def test_a_module_is_a_region_of_the_forward_pass(tmp_path):
    events = [annotation("ProfilerStep#1", 0, 1000), module("Net_0", 10, 200), module("Linear_0", 20, 50)]
    events += [*launch(1, 30, "gemm", 40, 70), *launch(2, 100, "relu", 120, 10)]
    events += [
        event("cpu_op", NODE, 300, 100, 2),
        module("Net_0", 310, 50, 2),
        *launch(3, 320, "gemm", 330, 20, 2),
    ]
    path = write(tmp_path / "rank0.json", events)
    regions, times = regions_of(path), read_rank(path).steps[0].times
    assert regions["nn.Module: Linear"].device_s == pytest.approx(70 * US)
    assert (regions["nn.Module: Net"].num_calls, regions["nn.Module: Net"].num_kernels) == (2, 3)
    assert regions[RECOMPUTED].device_s == pytest.approx(20 * US)
    assert (times.forward_s, times.backward_s) == (pytest.approx(80 * US), pytest.approx(20 * US))
    said = "Recomputation takes 20% of the time of computing kernels (20 us, at most 2% of a step); it saves"
    assert any(sentence.startswith(said) for sentence in read_capture(path).findings)


def test_modules_of_a_class_at_one_depth_are_one_row_with_the_longest_of_them(tmp_path):
    events = [annotation("ProfilerStep#1", 0, 1000)]
    events += [module("Sequential_0", 0, 300), module("Sequential_1", 10, 100), module("Linear_7", 20, 50)]
    events += [module("Linear_8", 80, 5), module("Linear_9", 200, 90), *launch(1, 210, "gemm", 220, 40)]
    write(tmp_path / "rank0.json", events, 0, 2)
    write(tmp_path / "rank1.json", [event for event in events if "Linear_7" not in event["name"]], 1, 2)
    table = tables.regions(read_capture(tmp_path))
    rows = {(row["name"].removeprefix("nn.Module: "), row["depth"]): row for row in table.rows}
    assert {key: (row["longest_at"], row["num"]) for key, row in rows.items()} == {
        ("Sequential", 0): ("Sequential_0", 1), ("Sequential", 1): ("Sequential_1", 1),
        ("Linear", 1): ("Linear_9", 1), ("Linear", 2): ("Linear_7", 2),
    }  # fmt: skip
    linear = rows["Linear", 2]
    assert (linear["num_calls"], linear["longest_s"]) == (1.5, pytest.approx(50 * US))
    assert (linear["total_s"], linear["device_s"]) == (pytest.approx(30 * US), 0)
    assert rows["Linear", 1]["device_s"] == pytest.approx(40 * US)


def test_notifications_of_deepep_are_told_from_transfers_with_their_blocks(tmp_path):
    events = [annotation("ProfilerStep#1", 0, 1000)]
    for number, name in enumerate(("notify_dispatch", "dispatch"), 1):
        call, kernel = launch(
            number, 10 * number, f"void deep_ep::internode::{name}<8>(int)", 100 * number, 50
        )
        kernel["args"]["grid"] = [20 // number, 1, 1]
        events += [call, kernel]
    rows = read_capture(write(tmp_path / "rank0.json", events)).collectives
    assert {row.kind: row.blocks for row in rows} == {
        "all_to_all (notify_dispatch)": 20, "all_to_all (dispatch)": 10,
    }  # fmt: skip


@pytest.mark.parametrize("reentrant", [True, False])
def test_recorded_checkpointing_is_shown_as_recomputation(tmp_path, reentrant):
    layer = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU())
    batch = torch.ones(64, 256, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], with_modules=True, with_stack=True) as profiler:
        with record_function("my forward"):
            output = checkpoint(layer, batch, use_reentrant=reentrant)
        with record_function("my backward"):
            output.sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "rank0.json"))
    regions = regions_of(tmp_path / "rank0.json")
    assert regions["nn.Module: Linear"].num_calls == 2
    assert 0 < regions[RECOMPUTED].total_s < regions["my backward"].total_s
    assert regions[RECOMPUTED].num_calls == 1


def test_python_functions_have_the_kernels_launched_inside_them_and_only_callers_are_left_out(tmp_path):
    def called(name, start_us, dur_us):
        return event("python_function", name, start_us, dur_us)

    events = [annotation("ProfilerStep#1", 0, 1000), called("a.py(1): only_calls", 0, 600)]
    events += [called("torch/_ops.py(9): __call__", 5, 590), called("a.py(2): rotate", 10, 400)]
    events += [called("a.py(2): rotate", 20, 100), event("cpu_op", "aten::mul", 25, 20)]
    events += [*launch(1, 30, "mul", 40, 70), *launch(2, 300, "add", 310, 30)]
    events += [called("a.py(3): product", 420, 100), event("cpu_op", "aten::mm", 421, 98)]
    events += [called(f"<built-in method of T at 0x{at}f>", 530 + at, 30) for at in (0, 30)]
    events += [called("a.py(4): short", 700, 9.0), called("a.py(5): little", 800, 22.0)]
    events.append(annotation("ProfilerStep#2", 1000, 4000))
    rows = tables.functions(read_capture(write(tmp_path / "rank0.json", events).parent)).rows
    found = [(row["name"], row["num_calls"], row["num_kernels"], round(row["total_s"] / US)) for row in rows]
    assert found == [("a.py(2): rotate", 0.5, 1, 200), ("<built-in method of T>", 1, 0, 30)]
    assert rows[0]["device_s"] == pytest.approx(50 * US)


def test_the_thread_that_runs_the_backward_pass_is_named_if_there_are_several(tmp_path):
    events = [*pipeline(), event("cpu_op", "aten::mm", 120, 20), event("cpu_op", "aten::item", 700, 3, 3)]
    capture = read_capture(write(tmp_path / "rank0.json", events))
    table = tables.host_threads(capture)
    assert [[table.write(column, row) for column in table.columns] for row in table.rows] == [
        ["thread 1", "1F1B", "1", "1.00", "2", "0.08"],
        ["thread 2", "nodes of autograd (backward)", "1", "0.05", "1", "0.06"],
    ]
    assert [thread.name for thread in capture.ranks[0].threads] == ["thread 1", "thread 2", "thread 3"]
