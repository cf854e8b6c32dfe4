"""Captures as the analysis gives them, without traces: a made run of any number of ranks and steps."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

from ddp_hpc.trace.model import (
    PARTS,
    Capture,
    Collective,
    CollectiveRow,
    Op,
    RankTrace,
    SlowLoad,
    Span,
    Step,
    Straggler,
    Times,
)

HOSTILE = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>\"'{{ 1 }}</script>\u202e\ud800 é"
_MIB = 2**20
_OPS = (
    ("aten::addmm", 96, 0.081), ("aten::mm", 144, 0.063), ("aten::_foreach_addcdiv_", 2, 0.012),
    ("aten::bmm", 48, 0.011), ("aten::native_layer_norm_backward", 30, 0.0062), ("aten::copy_", 61, 0.0055),
    ("aten::_softmax", 18, 0.0041), ("autograd::engine::evaluate_function: AddmmBackward0", 96, 0.0017),
    ("DistributedDataParallel.forward", 1, 0.0004),
)  # fmt: skip
_KERNELS = (
    ("ampere_sgemm_128x64_tn", 96, 0.031), ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 3, 0.019),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)", 210, 0.0042),
)  # fmt: skip


def capture(
    num_ranks: int = 4,
    num_steps: int = 3,
    *,
    name: str = "runs/default",
    slow_rank: int | None = 2,
    num_buckets: int = 3,
    data_s: float = 0.004,
    device: str = "cpu",
) -> Capture:
    """A run whose `slow_rank` takes longer forward; the others wait for it in the allreduce of backward."""
    ranks = tuple(
        _rank(rank, num_ranks, num_steps, rank == slow_rank, slow_rank is not None, num_buckets, data_s, device)
        for rank in range(num_ranks)
    )
    rank_means = tuple(mean_of([step.times for step in trace.steps]) for trace in ranks)
    mean = mean_of(rank_means)
    slow = [
        Straggler(
            slow_rank, "forward", 0.060, 0.060 / mean.wall_s,
            f"The other {num_ranks - 1} ranks waited 58.1 ms a step for it in all_reduce.",
        )
    ] if slow_rank is not None and num_ranks > 1 else [None]  # fmt: skip
    return Capture(
        name=name,
        world_size=num_ranks,
        ranks=ranks,
        missing=(),
        mean=mean,
        rank_means=rank_means,
        collectives=_rows(ranks),
        straggler=slow[0],
        slowest_load=SlowLoad(num_ranks - 1, num_steps, data_s * 1.4, data_s),
        findings=_findings(mean, slow[0]),
        notes=(),
    )


def mean_of(times: list[Times] | tuple[Times, ...]) -> Times:
    count = max(len(times), 1)
    return Times(**{part.name: sum(getattr(one, part.name) for one in times) / count for part in fields(Times)})


def _rank(
    rank: int, num_ranks: int, num_steps: int, is_slow: bool, waits: bool, num_buckets: int, data_s: float,
    device: str,
) -> RankTrace:  # fmt: skip
    late_s = 0.060 if waits else 0.0
    steps, spans, calls = [], [], []
    now = 17.5 + 0.0003 * rank
    for number in range(3, 3 + num_steps):
        start = now
        load_s = data_s * (1 + 0.1 * ((rank * 7 + number) % 5))
        lengths = {
            "data": load_s,
            "forward": 0.080 + 0.002 * (rank % 3) + (late_s if is_slow else 0),
            "backward": 0.140 + (0 if is_slow else late_s) - (load_s - data_s) - 0.002 * (rank % 3),
            "optimizer": 0.022,
        }
        if number == 2 + num_steps:
            lengths["snapshot"] = 0.015
        for region, dur_s in lengths.items():
            spans.append(Span(region, now, dur_s, number))
            if region == "backward":
                calls += _buckets(now, dur_s, number, num_ranks, num_buckets, 0 if is_slow else late_s)
            now += dur_s + 0.001
        exposed = 0.006 + (0 if is_slow else late_s)
        steps.append(
            Step(
                number,
                start,
                Times(
                    data_s=load_s, forward_s=lengths["forward"], backward_s=lengths["backward"] - exposed,
                    optimizer_s=0.022, snapshot_s=lengths.get("snapshot", 0.0), other_s=0.001,
                    comm_exposed_s=exposed, idle_s=0.001 * (len(lengths) - 1), comm_hidden_s=0.031,
                ),
            )  # fmt: skip
        )
    ops = tuple(Op(name, num, self_s * 1.2, self_s * (1 + 0.01 * rank)) for name, num, self_s in _OPS)
    kernels = tuple(Op(name, num, self_s, self_s) for name, num, self_s in _KERNELS)
    peaks = {"cpu": 311 * _MIB + rank * _MIB}
    return RankTrace(
        rank=rank, world_size=num_ranks, path=f"t/rank{rank:05d}-of-{num_ranks:05d}.json.gz",
        host=f"nid{1000 + rank // 4:06d}", device=device, steps=tuple(steps), spans=tuple(spans),
        collectives=tuple(calls), ops=ops, kernels=kernels if device != "cpu" else (),
        peak_bytes=peaks if device == "cpu" else peaks | {f"{device}:0": 2100 * _MIB}, num_events=24_187,
        notes=(),
    )  # fmt: skip


def _buckets(
    start_s: float, dur_s: float, step: int, num_ranks: int, num_buckets: int, waited_s: float
) -> list[Collective]:
    """DDP's buckets: each begins when its gradients are there, the last ends with backward."""
    space = (dur_s - waited_s) / (num_buckets + 1)
    starts = [start_s + space * (number + 1) for number in range(num_buckets)]
    ends = [*(after + waited_s for after in starts[1:]), start_s + dur_s]
    return [
        Collective(
            "all_reduce", "default_pg", num_ranks, (25 if number else 1) * _MIB, begin, 0.9 * (end - begin), step,
            begin + waited_s,
        )
        for number, (begin, end) in enumerate(zip(starts, ends, strict=True))
    ]  # fmt: skip


def _rows(ranks: tuple[RankTrace, ...]) -> tuple[CollectiveRow, ...]:
    rows = []
    for size in sorted({call.bytes for trace in ranks for call in trace.collectives}, reverse=True):
        calls = sorted(
            ((call.dur_s, trace.rank, call) for trace in ranks for call in trace.collectives if call.bytes == size),
            key=lambda one: one[:2],
        )  # fmt: skip
        dur_s, rank, slowest = calls[-1]
        median_s = calls[len(calls) // 2][0]
        transfer_s = sorted(call.dur_s - (call.arrived_s - call.start_s) for _, _, call in calls)[len(calls) // 2]
        num = slowest.num_ranks
        rows.append(
            CollectiveRow(
                slowest.kind, slowest.group, num, size, len(calls) // len(ranks), median_s,
                sum(one[0] for one in calls) / len(ranks), transfer_s, size / transfer_s * 2 * (num - 1) / num,
                dur_s, rank, slowest.step,
            )
        )  # fmt: skip
    return tuple(rows)


def _findings(mean: Times, straggler: Straggler | None) -> tuple[str, ...]:
    share = {part: getattr(mean, part) / mean.wall_s for part in PARTS}
    found = [f"A mean step takes {1e3 * mean.wall_s:.0f} ms, {100 * share['backward_s']:.0f} % of it backward."]
    if straggler:
        found.append(
            f"Rank {straggler.rank} is slow in {straggler.region}: {1e3 * straggler.excess_s:.0f} ms more than the others, "
            f"{100 * straggler.share:.0f} % of a step."
        )
    found.append(f"Data loading takes {100 * share['data_s']:.0f} % of a step.")
    return tuple(found)


def hostile() -> Capture:
    """Every text that comes out of a trace is markup, quotes, controls, or endless."""
    plain = capture(num_ranks=2, num_steps=2, device="cuda")
    endless = HOSTILE + "x" * 10_000
    ranks = tuple(
        replace(
            trace, host=endless, device=HOSTILE, path=HOSTILE, notes=(endless,),
            collectives=tuple(replace(call, kind=HOSTILE, group=endless) for call in trace.collectives),
            ops=(Op(HOSTILE, 1, 1.0, 1.0), Op(endless, 1, 1.0, float("inf")), Op("", 0, 0.0, float("nan"))),
            kernels=(Op(endless, 1, 1.0, 1.0),),
            peak_bytes={HOSTILE: 2**62},
        )
        for trace in plain.ranks
    )  # fmt: skip
    rows = tuple(replace(row, kind=endless, group=HOSTILE, busbw_bytes_per_s=float("inf")) for row in plain.collectives)
    assert plain.straggler is not None
    return replace(
        plain, name=endless, ranks=ranks, collectives=rows, findings=(HOSTILE, endless), notes=(HOSTILE, endless),
        straggler=replace(plain.straggler, region=HOSTILE, evidence=endless),
    )  # fmt: skip
