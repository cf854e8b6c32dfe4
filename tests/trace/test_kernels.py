"""What kernels do, which operators launched them, and which events the timeline shows by name."""

import pytest

from ddp_hpc.trace import tables
from ddp_hpc.trace.analyze_rank import read_rank
from ddp_hpc.trace.kernel_kinds import KINDS, kernel_category
from ddp_hpc.trace.summarize_run import capture_of, read_capture

from .made import annotation, event, write


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
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float> >", "optimizer"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda()>", "copies"),
        ("Memcpy HtoD (Pageable -> Device)", "copies"),
        ("void at::native::indexSelectLargeIndex<float, long>", "embedding and indexing"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "all_reduce"),
        ("my_kernel", "other"),
    ],
)  # fmt: skip
def test_the_kind_of_a_kernel_is_found_by_its_name(name, kind):
    assert kernel_category(name) == kind
    assert kind in KINDS or kind == "all_reduce"


def test_a_kernel_whose_name_says_nothing_has_the_kind_of_its_operator():
    assert kernel_category("_ZN12_GLOBAL__N_11kE", "aten::addmm") == "matrix products"
    assert kernel_category("ncclDevKernel_Generic(Storage<4096>)", "nccl:all_reduce") == "all_reduce"
    assert kernel_category("ncclDevKernel_Generic(Storage<4096>)") == "collective"


def launch(number, at_us, name, kernel_us, ran_us, tid=1):
    call = event("cuda_runtime", "cudaLaunchKernel", at_us, 2, tid, correlation=number)
    return [call, event("kernel", name, kernel_us, ran_us, 7, correlation=number)]


def training():
    """Two operators of one thread that launch three kernels, and one operator of another thread."""
    return [
        annotation("ProfilerStep#3", 0, 1000),
        annotation("attention block", 10, 300),
        event("cpu_op", "aten::linear", 20, 100),
        event("cpu_op", "aten::addmm", 30, 50),
        *launch(1, 40, "sgemm", 100, 60),
        *launch(2, 70, "bias", 160, 5),
        event("cpu_op", "aten::relu", 140, 20),
        *launch(3, 145, "vectorized_elementwise_kernel", 200, 10),
        event("cpu_op", "aten::copy_", 0, 900, 2),
        *launch(4, 60, "direct_copy_kernel", 400, 20, 2),
        event("kernel", "sgemm", 600, 7, 7, correlation=99),
    ]


def test_kernels_are_those_of_the_innermost_operator_around_their_launch(tmp_path):
    capture = read_capture(write(tmp_path / "rank0.json", training()).parent)
    rows = tables.kernels_by_operator(capture).rows
    assert [
        (row["operator"], row["name"], row["num_calls"], round(row["total_s"] * 1e6)) for row in rows
    ] == [
        ("aten::addmm", "sgemm", 1, 60),
        ("aten::copy_", "direct_copy_kernel", 1, 20),
        ("aten::relu", "vectorized_elementwise_kernel", 1, 10),
        ("aten::addmm", "bias", 1, 5),
    ]
    ops = {row["name"]: row for row in tables.operators(capture).rows}
    device = {
        name: (round(row["device_self_s"] * 1e6), round(row["device_s"] * 1e6)) for name, row in ops.items()
    }
    assert device == {
        "attention block": (0, 75), "aten::linear": (0, 65), "aten::addmm": (65, 65),
        "aten::relu": (10, 10), "aten::copy_": (20, 20),
    }  # fmt: skip


def test_the_kinds_of_kernels_are_summed_up_over_the_ranks(tmp_path):
    for rank in range(2):
        write(tmp_path / f"rank{rank}.json", training() + launch(5, 300, "sgemm", 700, 13 * rank), rank, 2)
    table = tables.kinds(read_capture(tmp_path))
    rows = [tuple(table.write(column, row) for column in table.columns) for row in table.rows]
    assert rows[0] == ("matrix products", "4", "0.08", "0.08", "1", "72.4%")
    assert [row[0] for row in rows] == ["matrix products", "copies", "elementwise"]


def test_the_driver_is_called_by_the_runtime_and_not_by_itself(tmp_path):
    events = [event("cpu_op", "aten::mm", 0, 50), event("cuda_runtime", "cudaLaunchKernelExC", 5, 20)]
    events += [event("cuda_driver", "cuLaunchKernelEx", 10, 5, correlation=1)]
    events += [event("kernel", "k", 30, 5, 7, correlation=1)]
    (kernel,) = read_rank(write(tmp_path / "rank0.json", events)).kernels
    assert (kernel.operator, kernel.kind) == ("aten::mm", "matrix products")


def named(trace):
    """Returns kind, name, level and the time since the launch of all events, in microseconds."""
    events = trace.named
    return [
        (events.kinds[name], events.names[name], level, round((start_s - launch_s) * 1e6))
        for name, level, start_s, launch_s in zip(
            events.name, events.level, events.start_s, events.launch_s, strict=True
        )
    ]


def test_events_have_names_levels_and_the_time_of_their_launch(tmp_path):
    trace = read_rank(write(tmp_path / "rank0.json", training(), base_ns=0))
    assert set(named(trace)) == {
        ("annotation", "attention block", 0, 0),
        ("operator", "aten::linear", 0, 0),
        ("operator", "aten::addmm", 1, 0),
        ("operator", "aten::relu", 0, 0),
        ("operator", "aten::copy_", 0, 0),
        ("matrix products", "sgemm", 0, 60),
        ("matrix products", "bias", 0, 90),
        ("elementwise", "vectorized_elementwise_kernel", 0, 55),
        ("copies", "direct_copy_kernel", 0, 340),
        ("matrix products", "sgemm", 0, 0),
    }
    assert trace.named.num_omitted == 0


def test_of_many_events_those_of_the_middle_step_and_the_longest_are_kept(tmp_path):
    events = []
    for number in range(3):
        at = 1000.0 * number
        events += [
            annotation(f"ProfilerStep#{number}", at, 1000),
            event("cpu_op", f"aten::op{number}", at, 20),
        ]
        events += launch(10 * number, at + 5, f"long{number}", at + 100, 200)
        events += launch(10 * number + 1, at + 8, f"short{number}", at + 400, 1)
    path = write(tmp_path / "rank0.json", events, base_ns=0)
    kept = {name for _, name, _, _ in named(read_rank(path, most_named=3))}
    assert kept == {"aten::op0", "aten::op1", "aten::op2", "short1", "long1", "long2"}
    assert read_rank(path, most_named=3).named.num_omitted == 3
    assert capture_of("run", [read_rank(path)]).ranks[0].named.num_omitted == 0
