"""What kernels do, which operators launched them, and which events the timeline shows by name."""

import itertools
import json
import math
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ddp_hpc.trace import kernel_tables, tables
from ddp_hpc.trace.analyze_rank import read_rank
from ddp_hpc.trace.event_names import distinguished, shortened
from ddp_hpc.trace.html_page import page
from ddp_hpc.trace.html_timeline import timeline
from ddp_hpc.trace.input_shapes import num_bytes, num_flops
from ddp_hpc.trace.kernel_kinds import kernel_category, uses_tensor_cores
from ddp_hpc.trace.recorded import about, details
from ddp_hpc.trace.summarize_run import read_capture

from .made import annotation, event, launch, training, write


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ampere_sgemm_128x64_nn", "matrix products"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT64x64x128", "matrix products"),
        ("nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT", "matrix products"),
        ("triton_tem_fused_addmm_3", "matrix products"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("triton_red_fused_add_addmm_native_layer_norm_4", "normalization"),
        ("triton_per_fused__softmax_2", "softmax and reductions"),
        ("triton_poi_fused_addmm_gelu_15", "elementwise"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128> >(Params)", "attention"),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_nhwckrsc_nchw_cudnn", "convolution"),
        ("void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 128>(float)", "normalization"),
        ("vllm::_typeConvert<c10::BFloat16>::exists, void>::type vllm::fused_add_rms_norm", "normalization"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, NormTwoOps> >",
         "softmax and reductions"),
        ("void cunn_SoftMaxForward<8, float, float, float>(float*)", "softmax and reductions"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >",
         "elementwise"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float> >", "parameter updates"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda()>", "copies"),
        ("Memcpy HtoD (Pageable -> Device)", "copies"),
        ("void at::native::indexSelectLargeIndex<float, long>", "embedding and indexing"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "all_reduce"),
        ("void dpsk::ep::internode::cached_notify<false>(int, int)", "all_to_all (cached_notify)"),
        ("void fbgemm_gpu::permute_2D_lengths_kernel<int>(int, int)", "embedding and indexing"),
        ("void fbgemm_gpu::bounds_check_indices_kernel<long>(at::PackedTensorAccessor64)",
         "embedding and indexing"),
        ("dense_embedding_codegen_forward_unweighted_kernel<float, float>", "embedding and indexing"),
        ("void at::native::max_pool_backward_nchw<c10::BFloat16, float, int>", "pooling"),
        ("batched_transpose_32x32_half", "copies"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, (vllm::Fp8KVCacheDataType)1>", "copies"),
        ("paged_attention_ll4mi_QKV_mfma16_kernel<0, (vllm::Fp8KVCacheDataType)0>", "attention"),
        ("distribution_elementwise_grid_stride_kernel<float, 4, at::native::normal_and_transform>",
         "elementwise"),
        ("void cuda::per_channel_cast_and_transpose<256, 128>(void*)", "quantization"),
        ("void cuda::swiglu_and_per_channel_cast_and_transpose<256, 128>(void*)", "elementwise"),
        ("void fft2d_r2c_32x32<float>(float2*, cudnn::reduced_divisor)", "convolution"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1_swiglu", "mixture of experts"),
        ("void moe::dev::finalize::finalizeKernelVecLoad<moe::dev::finalize::KernelParams>",
         "mixture of experts"),
        ("my_kernel", "other"),
    ],
)  # fmt: skip
def test_the_kind_of_a_kernel_is_found_by_its_name(name, kind):
    assert kernel_category(name) == kind


def test_a_kernel_whose_name_says_nothing_has_the_kind_of_its_operator():
    assert kernel_category("_ZN12_GLOBAL__N_11kE", "aten::addmm") == "matrix products"
    assert kernel_category("ncclDevKernel_Generic(Storage<4096>)", "nccl:all_reduce") == "all_reduce"
    assert kernel_category("ncclDevKernel_Generic(Storage<4096>)") == "collective"
    assert kernel_category("ncclKernel_SendRecv_RING_SIMPLE", "nccl:all_to_all") == "all_to_all"
    assert kernel_category("volta_sgemm_64x64_nt", "aten::convolution_backward") == "convolution"
    assert kernel_category("distribution_kernel", "aten::normal_") == "elementwise"
    assert kernel_category("bmm_E4m3", "vllm::moe_forward") == "mixture of experts"
    assert kernel_category("Memcpy DtoD", "vllm::moe_forward") == "copies"
    assert kernel_category("vector_norm_float", "aten::linalg_vector_norm") == "softmax and reductions"


def test_an_annotation_says_where_a_kernel_was_launched_but_not_what_it_does():
    assert kernel_category("get_layout(long const*)", "attn(F)") == "other"


def test_kernels_are_those_of_the_innermost_operator_around_their_launch(tmp_path):
    capture = read_capture(write(tmp_path / "rank0.json", training()).parent)
    rows = kernel_tables.kernels_by_operator(capture).rows
    assert [
        (row["operator"], row["name"], row["num_calls"], round(row["total_s"] * 1e6)) for row in rows
    ] == [
        ("aten::addmm", "sgemm", 1, 60),
        ("aten::copy_", "direct_copy_kernel", 1, 20),
        ("aten::relu", "vectorized_elementwise_kernel", 1, 10),
        ("aten::addmm", "bias", 1, 5),
    ]
    device = {row["name"]: round(row["device_s"] * 1e6) for row in tables.operators(capture).rows}
    assert device == {
        "aten::linear": 65, "aten::addmm": 65, "aten::relu": 10, "aten::copy_": 20,
    }  # fmt: skip


def test_the_kernels_of_an_operator_are_told_apart_by_the_shapes_of_its_inputs(tmp_path):
    events = [annotation("ProfilerStep#1", 0, 100)]
    for number, dims in enumerate(([[32, 3, 7], [], [64]], [[[8, 2], [4]]], [[32, 3, 7], [64], []], [])):
        args = {"Input Dims": dims} if dims else {}
        events.append(event("cpu_op", "aten::mm", 20 * number, 9, **args))
        events += launch(number, 20 * number + 1, "gemm", 20 * number + 5, 9 + number)
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    rows = kernel_tables.kernels_by_operator(capture).rows
    assert {row["shapes"]: row["num_calls"] for row in rows} == {"32x3x7, 64": 2, "8x2, 4": 1, "": 1}
    assert [row["num_calls"] for row in kernel_tables.kernels(capture).rows] == [4]


def test_shapes_of_torch_1_are_read(tmp_path):
    events = [
        annotation("ProfilerStep#1", 0, 100),
        event("cpu_op", "aten::mm", 0, 9, **{"Input dims": [[3, 7]]}),
    ]
    events += launch(1, 1, "gemm", 5, 9)
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert [row["shapes"] for row in kernel_tables.kernels_by_operator(capture).rows] == ["3x7"]


def test_traces_of_rocprofiler_have_the_block_in_the_place_of_the_grid(tmp_path):
    events = [annotation("ProfilerStep#1", 0, 100), *launch(1, 1, "gemm", 5, 9)]
    events[-1]["args"] |= {"grid": [512, 1, 1], "block": [512, 128, 1]}
    (trace,) = read_capture(write(tmp_path / "rank0.json", events).parent).ranks
    assert trace.kernels[0].launch[:2] == ((1, 128, 1), (512, 1, 1))


def test_one_large_block_decides_for_kernels_that_are_read_at_another_time(tmp_path):
    small = [annotation("ProfilerStep#1", 0, 100), *launch(1, 1, "copy", 5, 9)]
    small[-1]["args"] |= {"grid": [256, 1, 1], "block": [256, 2, 1]}
    large = launch(2, 15, "gemm", 20, 9)
    large[-1]["args"] |= {"grid": [512, 1, 1], "block": [512, 128, 1]}
    between = [event("cpu_op", "aten::add", 50, 1, text="x" * 2**20) for _ in range(3)]
    (trace,) = read_capture(write(tmp_path / "rank0.json", small + between + large).parent).ranks
    blocks = {kernel.name: kernel.launch[:2] for kernel in trace.kernels}
    assert blocks == {"copy": ((1, 2, 1), (256, 1, 1)), "gemm": ((1, 128, 1), (512, 1, 1))}


def test_collectives_of_which_only_the_calls_were_recorded_are_said_to_be_called(tmp_path):
    events = [annotation("ProfilerStep#1", 0, 100), event("cpu_op", "record_param_comms", 0, 9)]
    events += launch(1, 1, "gemm", 5, 9)
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    said = dict(details(capture))["communication"]
    assert said == "collectives were called, but their kernels were not recorded"


def test_the_operations_of_matrix_products_are_those_that_torch_counts():
    a, b, c, d = torch.ones(3, 5), torch.ones(5, 7), torch.ones(2, 3, 5), torch.ones(2, 5, 7)
    for name, run, shapes in (
        ("aten::mm", lambda: torch.mm(a, b), "3x5, 5x7 (float)"),
        ("aten::addmm", lambda: torch.addmm(b[0], a, b), "7, 3x5, 5x7 (float)"),
        ("aten::bmm", lambda: torch.bmm(c, d), "2x3x5, 2x5x7 (float)"),
        ("aten::baddbmm", lambda: torch.baddbmm(c[:, :, :1], c, d), "2x3x1, 2x3x5, 2x5x7 (float)"),
    ):
        with FlopCounterMode(display=False) as counter:
            run()
        assert num_flops(name, shapes) == counter.get_total_flops() > 0
    assert num_flops("aten::mm", "") == num_flops("aten::mm", "3x5") == 0
    assert num_flops("aten::add", "3x5, 5x7") == 0
    assert num_flops("aten::mm", "9" * 400 + "x1, 1x7") == num_flops("aten::mm", "9x" * 400 + "1, 1x7") == 0


@pytest.mark.parametrize(
    ("operator", "kind", "inputs", "num"),
    [
        ("aten::mul", "elementwise", "4x8 (BFloat16, double)", 2 * 2 * 32),  # by a number
        ("aten::add", "elementwise", "4x8, 8 (float)", 4 * (2 * 32 + 8)),
        ("aten::add_", "elementwise", "4x8, 4x8 (float)", 4 * 3 * 32),
        ("aten::fill_", "elementwise", "4x8 (float)", 4 * 32),
        ("aten::copy_", "copies", "4x8, 4x8 (float, BFloat16)", 6 * 32),
        ("aten::_softmax", "softmax and reductions", "2x4x8 (Half)", 2 * 2 * 64),
        ("aten::sum", "softmax and reductions", "4x8 (float)", 0),
        ("aten::cat", "copies", "4x8, 4x8 (TensorList)", 0),
        ("aten::add", "elementwise", "4x8, 8, 9 (float, int)", 0),
        ("aten::mul", "elementwise", "4x8, 4x8 (float, double)", 0),  # by a number, into the second tensor
        ("aten::mul", "elementwise", "4x8 (double, BFloat16)", 2 * 2 * 32),
        ("aten::mm", "copies", "4x8, 8x4 (BFloat16)", 0),  # what cuBLAS clears
        ("aten::miopen_convolution", "copies", "1x3x8x8, 3x3x3x3 (Half)", 0),  # what MIOpen transposes
        ("aten::eq", "elementwise", "4x8, 4x8 (float)", 0),  # its output has another type
        ("aten::mul", "elementwise", "x".join(["9" * 5000] * 40) + " (float)", 0),
        ("aten::mul", "elementwise", "", 0),
    ],
)
def test_the_bytes_of_simple_operators_are_those_of_inputs_and_output(operator, kind, inputs, num):
    assert num_bytes(operator, kind, inputs) == num


def test_matrix_products_have_a_speed_if_their_shapes_were_recorded(tmp_path):
    events = [annotation("ProfilerStep#1", 0, 100)]
    for number, dims in enumerate(([[1000, 1000], [1000, 2000]], [])):
        args = {"Input Dims": dims} if dims else {}
        events.append(event("cpu_op", "aten::mm", 20 * number, 9, **args))
        events += launch(number, 20 * number + 1, "gemm", 20 * number + 5, 10 - number)
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    speeds = [row["tflops"] for row in kernel_tables.kernels_by_operator(capture).rows]
    assert speeds == [pytest.approx(400), None]
    said = "from the shapes of 53% of them by time"
    assert dict(details(capture))["speed of matrix products"] == f"400 TFLOP/s, {said}"


def test_a_kernel_that_adds_up_parts_of_a_product_has_no_speed_but_its_time_counts(tmp_path):
    dims = {"Input Dims": [[1000, 1000], [1000, 2000]]}
    events = [annotation("ProfilerStep#1", 0, 100), event("cpu_op", "aten::mm", 0, 9, **dims)]
    events += [*launch(1, 1, "gemm", 5, 15), *launch(2, 4, "void splitKreduce_kernel", 20, 5)]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    rows = kernel_tables.kernels_by_operator(capture).rows
    assert [row["tflops"] for row in rows] == [pytest.approx(4 / 15e-3), None]
    said = "200 TFLOP/s, from the shapes of 100% of them by time"
    assert dict(details(capture))["speed of matrix products"] == said


@pytest.mark.parametrize(
    ("device", "dtype", "share"),
    [
        ("NVIDIA H100 80GB HBM3", "c10::BFloat16", " (40% of the device's peak in BFloat16)"),
        ("AMD Instinct MI300X VF", "c10::Half", " (31% of the device's peak in Half)"),
        ("NVIDIA H100 80GB HBM3", "double", ""),
        ("a new device", "c10::BFloat16", ""),
    ],
)
def test_the_speed_of_matrix_products_is_compared_with_the_peak_of_the_device(tmp_path, device, dtype, share):
    inputs = {"Input Dims": [[1000, 1000], [1000, 2000]], "Input type": [dtype, dtype]}
    events = [annotation("ProfilerStep#1", 0, 100), event("cpu_op", "aten::mm", 0, 9, **inputs)]
    path = write(tmp_path / "rank0.json", [*events, *launch(1, 1, "gemm", 5, 10)])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"deviceProperties": [{"name": device}]}))
    said = f"400 TFLOP/s{share}, from the shapes of 100% of them by time"
    assert dict(details(read_capture(path)))["speed of matrix products"] == said


def test_the_kinds_of_kernels_are_summed_up_over_the_ranks(tmp_path):
    for rank in range(2):
        write(tmp_path / f"rank{rank}.json", training() + launch(5, 300, "sgemm", 700, 13 * rank), rank, 2)
    table = kernel_tables.kinds(read_capture(tmp_path))
    rows = [tuple(table.write(column, row) for column in table.columns) for row in table.rows]
    assert rows[:2] == [
        ("all", "6", "0.11", "0.12", "1", "100.0%", "0%"),
        ("matrix products", "4", "0.08", "0.08", "1", "72.4%", "0%"),
    ]  # fmt: skip
    assert [row[0] for row in rows] == ["all", "matrix products", "copies", "elementwise"]


def test_a_stream_shows_the_time_and_the_kinds_of_what_runs_in_it(tmp_path):
    copy = event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 100, 38, 22, correlation=3)
    events = [
        annotation("ProfilerStep#1", 0, 200),
        *launch(1, 10, "sgemm", 20, 30),
        *launch(2, 15, "relu", 60, 10),
    ]
    table = kernel_tables.streams(read_capture(write(tmp_path / "rank0.json", [*events, copy]).parent))
    rows = [[table.write(column, row) for column in table.columns] for row in table.rows]
    assert rows == [
        ["stream 7", "2", "0.04", "20.0%", "matrix products 0.03; elementwise 0.01"],
        ["stream 22", "1", "0.04", "19.0%", "copies 0.04"],
    ]


def test_each_region_shows_what_takes_most_of_its_kernels(tmp_path):
    events = [annotation("ProfilerStep#1", 0, 200), annotation("forward", 0, 20)]
    events += [annotation("optimizer", 30, 20), event("cpu_op", "aten::mm", 5, 9)]
    events += [*launch(1, 8, "sgemm", 20, 30), *launch(2, 15, "relu", 60, 10), *launch(3, 35, "adam", 80, 20)]
    table = kernel_tables.regions(read_capture(write(tmp_path / "rank0.json", events).parent))
    assert [[table.write(column, row) for column in table.columns] for row in table.rows] == [
        [
            "forward",
            "2",
            "0.04",
            "20.0%",
            "matrix products 0.03; elementwise 0.01",
            "aten::mm 0.03; forward 0.01",
        ],
        ["optimizer", "1", "0.02", "10.0%", "parameter updates 0.02", "optimizer 0.02"],
    ]


def test_copies_of_a_stream_have_their_size_bandwidth_and_overlap_with_kernels(tmp_path):
    events = [annotation("ProfilerStep#1", 0, 100), *launch(1, 0, "sgemm", 60, 30)]
    for number, (dur_us, size, stream) in enumerate(((10, 10**5, 7), (30, 10**5, 7), (0, 8, 9))):
        name = "Memcpy DtoH (Device -> Pageable)"
        events.append(event("gpu_memcpy", name, 40 * number, dur_us, stream, correlation=9, bytes=size))
    table = kernel_tables.copies(read_capture(write(tmp_path / "rank0.json", events).parent))
    assert [[table.write(column, row) for column in table.columns[1:]] for row in table.rows] == [
        ["stream 7", "2", "0.04", "10.0", "30.0", "195.3 KiB", "5.00", "25%"],
        ["stream 9", "1", "0.00", "0.0", "0.0", "8 B", "-", "0%"],
    ]


def test_each_step_has_a_row_with_the_rank_that_takes_longest(tmp_path):
    for rank in range(2):
        events = [annotation("ProfilerStep#1", 0, 100), annotation("ProfilerStep#2", 100, 200 + 100 * rank)]
        write(tmp_path / f"rank{rank}.json", events, rank, 2)
    rows = tables.steps(read_capture(tmp_path)).rows
    found = [(row["name"], round(row["step"] * 1e6)) for row in rows]
    assert found == [("step 1", 100), ("step 2", 250), ("mean", 175)]
    assert (rows[1]["largest_rank"], round(rows[1]["largest_s"] * 1e6)) == (1, 300)


def test_kernels_whose_times_would_be_shown_as_zero_share_a_row(tmp_path):
    events = [
        event for at in range(3) for event in launch(at, 9 * at, f"k{at}", 9 * at + 4, 1 + 9 * (at == 1))
    ]
    table = kernel_tables.kernels(read_capture(write(tmp_path / "rank0.json", events).parent))
    rows = [tuple(table.write(column, row) for column in table.columns[:4]) for row in table.rows]
    assert rows == [("k1", "other", "1", "0.01"), ("2 others", "-", "2", "0.00")]


def test_rows_below_a_thousandth_of_a_step_are_joined_and_short_kernels_are_in_microseconds(tmp_path):
    events = [annotation("ProfilerStep#1", 0, 30_000), event("cpu_op", "aten::mul", 0, 90)]
    events += [
        one for at in range(3) for one in launch(at, 9 * at, f"k{at}", 100 + 90 * at, 9 + 50 * (at == 1))
    ]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    table = kernel_tables.kernels(capture)
    rows = [[table.write(column, row) for column in table.columns[:7]] for row in table.rows]
    assert rows == [
        ["k1", "elementwise", "1", "0.06", "59.0", "59.0", "59.0"],
        ["2 others", "-", "2", "0.02", "-", "-", "-"],
    ]
    assert [column.title for column in table.columns[4:7]] == ["shortest us", "median us", "longest us"]
    assert not kernel_tables.streams(capture).rows, "there is one"


def test_a_kernel_shows_the_graph_that_launched_it_and_a_grid_smaller_than_the_device(tmp_path):
    call, kernel = launch(1, 5, "kernel", 20, 30)
    kernel["args"]["grid"] = [64, 1, 1]
    events = [annotation("execute", 0, 50), call | {"name": "hipGraphLaunch"}, kernel]
    path = write(tmp_path / "rank0.json", [*events, *launch(2, 12, "other", 60, 9)])
    properties = [{"name": "", "numSms": 304}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"deviceProperties": properties}))
    capture = read_capture(path.parent)
    rows = {row["name"]: row for row in kernel_tables.kernels(capture).rows}
    assert {name: row["launcher"] for name, row in rows.items()} == {
        "kernel": "hipGraphLaunch in execute", "other": "execute",
    }  # fmt: skip
    assert (rows["kernel"]["grid"], rows["other"]["grid"]) == ("64x1x1: on 64 of 304 SMs or CUs", None)
    assert dict(about(capture))["device"] == "AMD GPU"


def test_a_kernel_before_the_first_step_has_the_kind_of_those_in_the_steps(tmp_path):
    events = [annotation("ProfilerStep#1", 100, 400), event("cpu_op", "aten::miopen_convolution", 100, 50)]
    events += [*launch(2, 110, "Cijk_Ailk", 200, 50), event("kernel", "Cijk_Ailk", 20, 60, 7, correlation=1)]
    trace = read_rank(write(tmp_path / "rank0.json", events))
    assert [event.kind for event in trace.named if event.name == "Cijk_Ailk"] == ["convolution"] * 2


def test_a_kernel_of_several_collectives_has_a_row_for_each(tmp_path):
    events = [annotation("nccl:all_reduce", 0, 20), *launch(1, 5, "ncclDevKernel_Generic", 30, 40)]
    events += [annotation("nccl:broadcast", 50, 20), *launch(2, 55, "ncclDevKernel_Generic", 80, 10)]
    rows = kernel_tables.kernels(read_capture(write(tmp_path / "rank0.json", events).parent)).rows
    assert [(row["kind"], row["num_calls"]) for row in rows] == [("all_reduce", 1), ("broadcast", 1)]
    assert [round(row["median_s"] * 1e6) for row in rows] == [40, 10]


def test_the_median_of_a_kernel_is_that_of_its_calls_on_all_ranks(tmp_path):
    for rank, durations in enumerate(((10, 20, 1000), (30, 40, 50))):
        calls = [launch(i, i, "kernel", 100 + 1100 * i, dur_us) for i, dur_us in enumerate(durations)]
        write(tmp_path / f"rank{rank}.json", [one for call in calls for one in call], rank, 2)
    (row,) = kernel_tables.kernels(read_capture(tmp_path)).rows
    assert row["median_s"] == pytest.approx(35e-6)


def test_the_timeline_shows_a_copy_from_pageable_memory_as_a_blocking_call(tmp_path):
    copy = event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 10, 5, 7, correlation=1)
    call = event("cuda_runtime", "cudaMemcpyAsync", 0, 20, correlation=1)
    trace = read_rank(write(tmp_path / "rank0.json", [call, copy, *launch(2, 30, "sgemm", 40, 9)]))
    kinds = {one.name: one.kind for one in trace.named if one.name.startswith("cuda")}
    assert kinds == {"cudaMemcpyAsync": "blocking call", "cudaLaunchKernel": "runtime call"}


def test_a_kernel_in_the_timeline_has_the_shapes_of_its_operator(tmp_path):
    operator = event(
        "cpu_op", "aten::mm", 0, 20, **{"Input Dims": [[8, 4], [4, 2]], "Input type": ["float"] * 2}
    )
    trace = read_rank(write(tmp_path / "rank0.json", [operator, *launch(1, 5, "sgemm", 30, 40)]))
    (kernel,) = (one for one in trace.named if one.name == "sgemm")
    assert kernel.details == "inputs: 8x4, 4x2 (float)"


def test_the_driver_is_called_by_the_runtime_and_not_by_itself(tmp_path):
    events = [event("cpu_op", "aten::mm", 0, 50), event("cuda_runtime", "cudaLaunchKernelExC", 5, 20)]
    events += [event("cuda_driver", "cuLaunchKernelEx", 10, 5, correlation=1)]
    events += [event("kernel", "k", 30, 5, 7, correlation=1)]
    (kernel,) = read_rank(write(tmp_path / "rank0.json", events)).kernels
    assert (kernel.operator, kernel.kind) == ("aten::mm", "matrix products")


def test_calls_that_can_wait_for_the_device_have_a_kind_of_their_own(tmp_path):
    names = ["cudaStreamSynchronize", "hipFree", "cudaMalloc", "hipMemcpyWithStream", "cuMemcpyDtoH_v2"]
    others = ["cudaLaunchKernel", "cudaMemcpyAsync", "cudaFreeAsync", "cudaEventRecord"]
    events = [event("cuda_runtime", name, 10 * at, 5) for at, name in enumerate([*names, *others])]
    trace = read_rank(write(tmp_path / "rank0.json", [event("cpu_op", "aten::mm", 0, 200), *events]))
    assert [one.name for one in trace.named if one.kind == "blocking call"] == names
    assert [one.name for one in trace.named if one.kind == "runtime call"] == others


def test_a_collective_has_the_operators_around_its_launch(tmp_path):
    events = [event("cpu_op", "exchange", 0, 50), event("cpu_op", "c10d::allreduce_", 5, 40)]
    events += launch(1, 10, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", 100, 75)
    capture = read_capture(write(tmp_path / "rank0.json", events))
    (bars,) = (trace for trace in timeline(capture).figure["data"] if trace["name"] == "collective")
    assert bars["meta"]["texts"][bars["meta"]["callers"][0]] == "exchange > c10d::allreduce_"
    assert bars["base"][0] - bars["meta"]["launched"][0] == pytest.approx(0.09)


def test_a_recording_without_steps_has_no_column_of_them(tmp_path):
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"
    capture = read_capture(write(tmp_path / "rank0.json", launch(1, 10, name, 100, 75), host=""))
    table = tables.collectives(capture)
    assert "on rank" in [column.title for column in table.columns]
    assert [row["slowest"] for row in table.rows] == ["0"]
    assert not {"steps", "hosts"} & {term for term, _ in about(capture)}
    assert "<label hidden>step <select>" in page([capture], [])


def test_a_kernel_has_the_details_that_its_trace_contains(tmp_path):
    call, kernel = launch(1, 5, "sgemm", 10, 20)
    kernel["args"] |= {"grid": [80, 2, 1], "block": [256, 1, 1], "registers per thread": 32}
    kernel["args"] |= {"shared memory": 16384, "est. achieved occupancy %": 25}
    trace = read_rank(write(tmp_path / "rank0.json", [call, kernel, *launch(2, 40, "sgemm", 50, 5)]))
    assert [one.details for one in trace.named if one.kind == "matrix products"] == [
        "grid 80 x 2 x 1, block 256 x 1 x 1, 32 registers per thread, 16.0 KiB of shared memory, "
        "achieved occupancy 25% (estimate)",
        "",
    ]


def test_a_call_between_two_steps_of_the_host_belongs_to_the_step_that_the_device_runs(tmp_path):
    events = [annotation("ProfilerStep#1", 0, 100), annotation("ProfilerStep#2", 500, 100)]
    events += [*launch(1, 10, "sgemm", 50, 300), *launch(2, 510, "sgemm", 520, 50)]
    trace = read_rank(write(tmp_path / "rank0.json", events, base_ns=0))
    assert [trace.step_at(at * 1e-6, on_host=True) for at in (50, 200, 450, 550)] == [1, 1, None, 2]


def test_events_have_names_and_the_operators_around_their_launch(tmp_path):
    trace = read_rank(write(tmp_path / "rank0.json", training(), base_ns=0))
    assert {(event.kind, event.name, event.callers) for event in trace.named} == {
        ("annotation", "attention block", ""),
        ("operator", "aten::linear", ""),
        ("operator", "aten::addmm", ""),
        ("operator", "aten::relu", ""),
        ("operator", "aten::copy_", ""),
        ("runtime call", "cudaLaunchKernel", "attention block > aten::linear > aten::addmm"),
        ("runtime call", "cudaLaunchKernel", "attention block > aten::relu"),
        ("runtime call", "cudaLaunchKernel", "aten::copy_"),
        ("matrix products", "sgemm", "attention block > aten::linear > aten::addmm"),
        ("matrix products", "bias", "attention block > aten::linear > aten::addmm"),
        ("elementwise", "vectorized_elementwise_kernel", "attention block > aten::relu"),
        ("copies", "direct_copy_kernel", "aten::copy_"),
        ("matrix products", "sgemm", ""),
    }
    (first,) = (event for event in trace.named if event.name == "aten::addmm")
    assert (first.start_s, first.dur_s) == pytest.approx((30e-6, 50e-6))
    launched = [event.launched_s for event in trace.named if event.name == "sgemm"]
    assert launched == [pytest.approx(40e-6), math.inf]


def test_modules_and_python_functions_that_are_not_short_are_named(tmp_path):
    calls = {"nn.Module: Linear_0": 5, "train.py(3): load": 40, "train.py(9): step": 19}
    events = [event("python_function", name, 0, dur) for name, dur in calls.items()]
    trace = read_rank(write(tmp_path / "rank0.json", [*events, event("cpu_op", "aten::mm", 1, 3)]))
    named = [one.name for one in trace.named if one.kind == "Python call"]
    assert named == ["nn.Module: Linear_0", "train.py(3): load"]


def test_python_functions_that_only_call_another_one_or_launch_nothing_are_not_named(tmp_path):
    spans = {"main.py(1): main": (0, 100), "train.py(3): load": (2, 95), "image.py(7): decode": (3, 60)}
    events = [event("python_function", name, ts, dur) for name, (ts, dur) in spans.items()]
    events += [
        event("python_function", "tqdm/_monitor.py(5): run", 0, 100, tid=9),
        event("cpu_op", "aten::mm", 1, 3),
    ]
    trace = read_rank(write(tmp_path / "rank0.json", events))
    named = [one.name for one in trace.named if one.kind == "Python call"]
    assert sorted(named) == ["image.py(7): decode", "train.py(3): load"]


def test_of_many_events_those_of_the_middle_step_and_the_longest_are_named(tmp_path):
    events = []
    for number in range(3):
        at = 1000.0 * number
        events += [annotation(f"ProfilerStep#{number}", at, 1000)]
        events += [event("cpu_op", f"aten::op{number}", at, 20 + number)]
        events += launch(10 * number, at + 5, f"long{number}", at + 100, 200 + number)
        events += launch(10 * number + 1, at + 8, f"short{number}", at + 400, 1)
    path = write(tmp_path / "rank0.json", events, base_ns=0)
    assert {event.name for event in read_rank(path, most_named=3).named} == {
        "aten::op0", "aten::op1", "aten::op2", "short1", "long1", "long2", "cudaLaunchKernel",
    }  # fmt: skip
    assert "shows only 3 operators and as many kernels by name" in read_rank(path, most_named=3).notes[-1]
    assert not any("by name" in note for note in read_rank(path).notes)


def test_estimates_of_kernels_are_weighted_by_their_time(tmp_path):
    events = [annotation("ProfilerStep#0", 0, 900)]
    for number, name, ran_us, occupancy, shared in (
        (1, "ampere_fp16_s16816gemm_fp16_128x128", 100, 20, 0),
        (2, "ampere_sgemm_64x64", 300, 60, 0),
        # Kineto's estimate is 0, since the kernel uses more than 48 KiB of shared memory.
        (3, "sm90_xmma_gemm_bf16bf16", 100, 0, 65_536),
        (4, "elementwise_kernel", 100, -1, 0),
    ):
        call, kernel = launch(number, 100.0 * number, name, 500 * number, ran_us)
        kernel["args"] |= {"est. achieved occupancy %": occupancy, "shared memory": shared}
        events += [call, kernel]
    events += launch(5, 600, "Memcpy HtoD", 4000, 1000)
    events[-1]["cat"] = "gpu_memcpy"
    table = kernel_tables.kinds(read_capture(write(tmp_path / "rank0.json", events).parent))
    shown = {
        row["kind"]: tuple(table.write(column, row) for column in table.columns[-2:]) for row in table.rows
    }
    assert shown == {
        "all": ("33%", "50%"),
        "matrix products": ("40%", "50%"),
        "elementwise": ("0%", "-"),
        "copies": ("-", "-"),
    }


def test_only_kernels_and_operators_that_begin_in_the_steps_are_counted(tmp_path):
    """The host is ahead: the last kernel of each step runs when the host is in the next one."""
    events = []
    for number, at in enumerate((0, 100, 200)):
        if number:
            events.append(annotation(f"ProfilerStep#{number}", at, 100))
        events += [
            event("cpu_op", "aten::mm", at + 10, 20),
            *launch(2 * number, at + 15, "gemm", at + 20, 50),
        ]
        events += [
            event("cpu_op", "aten::mm", at + 40, 20),
            *launch(2 * number + 1, at + 45, "gemm", at + 110, 9),
        ]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert [row["num_calls"] for row in kernel_tables.kernels(capture).rows] == [2], "per step"
    assert [row["total_s"] for row in kernel_tables.kinds(capture).rows] == [pytest.approx(59e-6)] * 2
    (operator,) = tables.operators(capture).rows
    assert (operator["num_calls"], operator["device_s"]) == (2, pytest.approx(59e-6))


def test_a_kernel_that_was_launched_before_the_recording_is_in_no_table(tmp_path):
    """Correlation IDs increase, so the launch of the third kernel is missing for another reason."""
    events = [annotation("ProfilerStep#1", 0, 100), *launch(7, 10, "gemm", 30, 20)]
    events += [launch(6, 0, "before", 5, 10)[1], launch(8, 0, "lost", 60, 10)[1]]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert [row["name"] for row in kernel_tables.kernels(capture).rows] == ["gemm", "lost"]


def test_what_precedes_the_backward_pass_is_the_forward_pass_if_it_is_not_annotated(tmp_path):
    node = event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 40, 20, 2)
    events = [annotation("ProfilerStep#1", 0, 100), annotation("zero_grad", 0, 8), node]
    for number, (moment, thread) in enumerate(((5, 1), (10, 1), (45, 2), (70, 1))):
        events += launch(number, moment, "gemm", 100 + 100 * number, 10 * (number + 1), thread)
    trace = read_rank(write(tmp_path / "rank0.json", events))
    times = trace.steps[0].times
    found = (times.optimizer_s, times.forward_s, times.backward_s, times.other_s)
    assert found == pytest.approx((10e-6, 20e-6, 30e-6, 40e-6))
    assert trace.notes[0].startswith(
        "the forward pass is not annotated, so what is launched in a step before"
    )


def test_a_forward_pass_without_annotation_is_noted(tmp_path):
    events = [annotation("ProfilerStep#1", 0, 100), *launch(1, 10, "gemm", 30, 20)]
    (note,) = read_rank(write(tmp_path / "rank0.json", events)).notes
    assert note.startswith("the forward pass is not annotated, so its kernels count as other computation")
    marked = write(tmp_path / "marked" / "rank0.json", [*events, annotation("forward", 5, 10)])
    assert read_rank(marked).notes == ()


def test_the_matrix_cores_of_amd_are_found_by_the_names_of_kernels(tmp_path):
    events = [annotation("ProfilerStep#0", 0, 400)]
    names = (
        "igemm_bwd_gtcx3_nhwc_bf16_bx0",
        "Cijk_Alik_Bljk_BBS_BH_MT64x64x32_MI16x16x16x1",
        "batched_transpose",
    )
    for number, name in enumerate(names):
        call, kernel = launch(number, 10.0 * number, name, 100 * number + 50, 40)
        events += [call | {"name": "hipLaunchKernel"}, kernel]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert dict(details(capture))["Tensor or matrix cores"] == (
        "used 67% of the time of computing kernels, by their names; "
        "occupancy of computing kernels: not recorded for most kernels"
    )


def test_nothing_is_said_of_matrix_cores_if_no_name_shows_them(tmp_path):
    events = [annotation("ProfilerStep#0", 0, 400), *launch(0, 10.0, "_matmul_triton", 50, 40)]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    said = dict(details(capture))["Tensor or matrix cores"]
    assert said.startswith("unknown; occupancy of computing kernels: ")


def test_calls_inside_other_calls_are_not_shown(tmp_path):
    events = [event("cuda_runtime", "cudaLaunchKernelExC", 5, 20)]
    events += [event("cuda_driver", "cuLaunchKernelEx", 10, 5, correlation=1)]
    trace = read_rank(
        write(tmp_path / "rank0.json", [*events, event("kernel", "k", 30, 5, 7, correlation=1)])
    )
    assert [one.name for one in trace.named if one.kind == "runtime call"] == ["cudaLaunchKernelExC"]


@pytest.mark.parametrize(
    ("name", "dims", "types", "shown"),
    [
        ("aten::conv2d", [[8, 3, 9, 9], [4, 3, 3, 3]], ["c10::Half"], "8x3x9x9 Half"),
        ("aten::linear", [[16, 13], [256, 13], []], ["float", "", ""], "16x13 float"),
        ("aten::embedding", [[999, 64], [4, 128]], ["float", "long int"], "4x128 long int"),
        ("aten::addmm", [[7], [9, 5], [5, 7]], ["float"] * 3, "9x5 float"),
    ],
)  # fmt: skip
def test_the_input_of_the_first_layer_shows_its_shape(tmp_path, name, dims, types, shown):
    inputs = {"Input Dims": dims, "Input type": types}
    events = [annotation("ProfilerStep#0", 10, 90), event("cpu_op", "aten::mm", 0, 1, **inputs)]
    events += [event("cpu_op", "aten::relu", 20, 1, **inputs), event("cpu_op", name, 30, 20, **inputs)]
    events += [event("cpu_op", "aten::linear", 60, 20, **{"Input Dims": [[1, 1]]})]
    capture = read_capture(write(tmp_path / "rank0.json", events))
    assert dict(details(capture))["input of the first layer"] == f"{shown} in {name}"


def test_the_first_layer_is_unknown_if_graphs_run_before_the_first_operator(tmp_path):
    events = [event("cuda_runtime", "cudaGraphLaunch", 0, 5, correlation=1), event("kernel", "k", 8, 90, 7)]
    events += [
        event("cpu_op", "aten::linear", 20, 9, **{"Input Dims": [[46, 2880], [9, 2880]]})
    ]  # the last layer
    capture = read_capture(write(tmp_path / "rank0.json", events))
    assert dict(details(capture))["input of the first layer"].startswith(
        "not recorded, because the first layers"
    )


def test_missing_shapes_are_said_with_the_option_that_records_them(tmp_path):
    capture = read_capture(write(tmp_path / "rank0.json", training()))
    said = "shapes were not recorded (record_shapes=True)"
    assert dict(details(capture))["input of the first layer"] == said


@pytest.mark.parametrize(
    ("types", "shown"),
    [(["c10::BFloat16", "", "Scalar"], "75.0% BFloat16, 25.0% float"), ([], "75.0% Half, 25.0% float")],
)
def test_the_data_types_of_matrix_products_are_those_of_inputs_or_names(tmp_path, types, shown):
    inputs = {"Input Dims": [[2, 2], [], []], "Input type": types}
    events = [event("cpu_op", "aten::mm", 0, 50, **inputs), *launch(1, 5, "hgemm_128x64", 100, 75)]
    events += [event("cpu_op", "aten::mm", 60, 50), *launch(2, 65, "sgemm_32x32", 200, 25)]
    events += launch(3, 120, "elementwise_kernel<float>", 300, 500)
    capture = read_capture(write(tmp_path / "rank0.json", events))
    share = "; these kernels take 16.7% of the time of computing kernels"
    assert dict(details(capture))["data types of matrix products"] == shown + share
    assert "data types of attention" not in dict(details(capture))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3", "FP4 with FP8"),
        ("bmm_Bfloat16_E4m3E4m3_Fp32_t128x8x128u2_s6", "FP8"),
        ("paged_attention_mfma16<__hip_bfloat16, (vllm::Fp8KVCacheDataType)1>", "FP8"),
        ("paged_attention_mfma16<__hip_bfloat16, (vllm::Fp8KVCacheDataType)0>", "BFloat16"),
    ],
)
def test_a_kernel_with_a_type_of_fewer_bits_in_its_name_has_this_type(tmp_path, name, shown):
    inputs = {"Input Dims": [[2, 2]], "Input type": ["c10::BFloat16"]}
    events = [event("cpu_op", "vllm::moe_forward", 0, 50, **inputs), *launch(1, 5, name, 100, 75)]
    capture = read_capture(write(tmp_path / "rank0.json", events))
    assert dict(details(capture))["data types of mixture of experts"] == f"100.0% {shown}"
    assert uses_tensor_cores(name, "attention") == (1 if name.startswith("bmm_") else None)


@pytest.mark.parametrize(
    ("functor", "shown"),
    [
        ("at::native::sqrt_kernel_cuda(at::TensorIteratorBase&)::{lambda()#2}::operator()() const::"
         "{lambda()#2}::operator()() const::{lambda(float)#1}", "sqrt_kernel_cuda"),
        ("at::native::CUDAFunctor_add<float>", "CUDAFunctor_add<float>"),
    ],
)  # fmt: skip
def test_a_short_name_of_a_kernel_says_what_it_computes(functor, shown):
    name = f"void at::native::vectorized_elementwise_kernel<4, {functor}, at::detail::Array<char*, 2> >"
    whole = f"{name}(int, {functor}, at::detail::Array<char*, 2>)"
    assert shortened(whole, 60).startswith(f"vectorized_elementwise_kernel<4, {shown}")


def test_names_that_are_equal_if_shortened_show_where_they_differ():
    form = "void implicit_sgemm<float, float, {}, 6, 7, 3, 3, {}, 1, false, true, true>(int)"
    names = [form.format(*numbers) for numbers in ((128, 5), (128, 9), (64, 5))]
    assert len({shortened(name, 40) for name in names}) == 1
    assert [*distinguished([*names, "gemm"], 40).values()] == [
        "implicit_sgem...at, 128, 6, 7, 3, 3, ...",
        "implicit_sgem...at, 128, 6, 7, 3, 3, ... #2",
        "implicit_sgem...at, 64, 6, 7, 3, 3, 5...",
        "gemm",
    ]


def test_words_of_a_name_that_differ_are_shown_without_parameters():
    form = "void split_embedding_backward_codegen_rowwise_adagrad_{}_kernel_{}_per_row_1<float>({})"
    pairs = itertools.product(("weighted", "unweighted"), ("cta", "warp"))
    names = [form.format(*pair, "at::GenericPackedTensorAccessor<float, 2ul>, " * 9) for pair in pairs]
    assert [*distinguished(names, 64).values()] == [
        "split_embedding_backw...rad_weighted_kernel_cta_per_row_1<float>",
        "split_embedding_backw...rad_weighted_kernel_warp_per_row_1<fl...",
        "split_embedding_backw...rad_unweighted_kernel_cta_per_row_1<f...",
        "split_embedding_backw...rad_unweighted_kernel_warp_per_row_1<...",
    ]


def test_names_that_differ_only_in_lambdas_show_them():
    form = "void at::native::vectorized_kernel<4, at::native::log_kernel::{}>(int, char*)"
    names = [form.format("{lambda(" + dtype + ")#1}") for dtype in ("double", "float")]
    assert [*distinguished(names, 40).values()] == [
        "vectorized_ke...bda(double)#1}>",
        "vectorized_ke...bda(float)#1}>",
    ]


def test_names_with_too_many_differences_have_numbers():
    names = ["k" * 40 + "_".join(bits) for bits in itertools.product("01", repeat=9)]
    short = distinguished(names, 24)
    assert len(set(short.values())) == 512
    assert any(text.endswith(" #2") for text in short.values())


def test_much_time_in_changes_of_the_memory_format_gets_advice(tmp_path):
    events = [annotation("ProfilerStep#0", 0, 900), *launch(1, 0, "batched_transpose_32x32_half", 100, 100)]
    events += launch(2, 10, "Cijk_Ailk_MI16", 200, 500)
    said = read_capture(write(tmp_path / "rank0.json", events).parent).findings
    assert any("NCHW and NHWC take 17% of the time of computing kernels " in sentence for sentence in said)


def test_the_first_of_the_longest_calls_of_a_kernel_is_placed_in_its_step(tmp_path):
    events = [annotation("ProfilerStep#1", 0, 10_000)]
    for number in range(3):
        call, kernel = launch(number, 10 + number, "sgemm", 1000 + 80 * number, 20 + 10 * (number > 0))
        kernel["args"] |= {"grid": [8, 2, 1], "block": [128, 1, 1], "registers per thread": 40}
        events += [call, kernel]
    table = kernel_tables.kernels(read_capture(write(tmp_path / "rank0.json", events).parent))
    assert [table.write(column, table.rows[0]) for column in table.columns[-1:]] == ["8x2x1, 128x1x1"]
    assert table.rows[0]["longest_at"] == "step 1, 1.08 ms"


def test_the_summary_names_the_longest_call_and_where_it_is_on_the_timeline(tmp_path):
    """Rank 1 begins its step 50 us after rank 0."""
    for rank, at in enumerate((0, 50)):
        inputs = {"Input Dims": [[8, 4], [4, 2]], "Input type": ["float", "float"]}
        events = [annotation("ProfilerStep#1", at, 900), event("cpu_op", "aten::mm", at + 5, 9, **inputs)]
        events += launch(1, at + 8, "sgemm", at + 20, 30 + at)
        write(tmp_path / f"rank{rank}.json", events, rank, 2)
    capture = read_capture(tmp_path)
    assert kernel_tables.kernels(capture).rows[0]["longest_at"] == "rank 1, step 1, 0.07 ms"
    assert dict(details(capture))["longest call of a computing kernel in the steps"] == (
        "sgemm, 80 us, at rank 1, step 1, 0.07 ms, launched by aten::mm with inputs of 8x4, 4x2 (float)"
    )


def test_the_speed_is_that_of_the_first_dimension_of_the_first_input(tmp_path):
    inputs = {"Input Dims": [[32, 3, 9, 9], [4, 3, 3, 3]], "Input type": ["float", "float"]}
    events = [annotation("ProfilerStep#1", 0, 1000), event("cpu_op", "aten::conv2d", 30, 20, **inputs)]
    capture = read_capture(write(tmp_path / "rank0.json", events).parent)
    assert dict(details(capture))["speed"].startswith("32,000 samples per second on a rank, if the first ")


@pytest.mark.parametrize("name", ["silu_" * 20_000, "scale" * 20_000])
def test_the_kind_of_a_very_long_name_is_found_at_once(name):
    start_s = time.perf_counter()
    assert kernel_category(name) in ("elementwise", "other")
    assert time.perf_counter() - start_s < 2
