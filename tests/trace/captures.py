"""Captures without traces: a synthetic run of any number of ranks, and one with hostile text everywhere."""

from dataclasses import replace
from typing import Any

from ddp_hpc.trace.analysis_results import Capture, Collective, CriticalPath, PathPart, RankTrace, Step, Times
from ddp_hpc.trace.named_results import Kernel, LaunchStats, Memory, NamedEvent, Op
from ddp_hpc.trace.summarize_run import capture_of

HOSTILE = (
    "<b>b</b><script>window.ran=1</script><img src=x onerror='window.ran=1'>\"'{{ 1 }}\u202e\ud800 \u00e9"
)
ENDLESS = HOSTILE + "x" * 10_000
_MIB = 2**20
_OPS = {"aten::addmm": 0.081, "aten::mm": 0.063, "aten::bmm": 0.011, "aten::copy_": 0.0055}
_LATE_S = 0.060


def made(
    num_ranks: int = 4,
    num_steps: int = 3,
    *,
    name: str = "traces",
    slow_rank: int | None = 2,
    num_buckets: int = 3,
    data_s: float = 0.004,
) -> Capture:
    """A run whose `slow_rank` is 60 ms late in forward; the others wait in backward's all_reduces."""
    return capture_of(
        name, [_rank(rank, num_ranks, num_steps, slow_rank, num_buckets, data_s) for rank in range(num_ranks)]
    )


KERNEL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3>)"
)


def on_device(num_ranks: int = 2, **run: Any) -> Capture:
    """A run on GPUs, with a kernel whose name is long, a critical path and a warning."""
    capture = made(num_ranks, slow_rank=None, **run)
    idle = {"idle_s": 0.020, "idle_host_s": 0.020}
    ranks = tuple(
        replace(
            trace,
            path=f"worker{trace.rank}.pt.trace.json",
            device="cuda",
            device_name="NVIDIA A100-SXM4-40GB",
            steps=tuple(replace(one, times=replace(one.times, **idle)) for one in trace.steps),
            kernels=(Kernel(KERNEL, "aten::add_", "elementwise", 96, 0.05),),
            busy=tuple((step.start_s + 0.01, step.start_s + 0.2, 1.0) for step in trace.steps),
            launches=LaunchStats(260, 264, 180, 159, 5e-6, 2e-6),
        )
        for trace in capture.ranks
    )
    rows = (PathPart("compute", KERNEL, 0.2, 96, 1), PathPart("wait", "for data", 0.05, 1, 0))
    return replace(
        capture_of("gpus", ranks),
        warnings=("Warning: worker1.pt.trace.json is cut off, so the times after the cut are missing.",),
        path=CriticalPath(4, 0, 1, rows),
    )


def _rank(
    rank: int, num_ranks: int, num_steps: int, slow_rank: int | None, num_buckets: int, data_s: float
) -> RankTrace:
    late_s = _LATE_S if rank == slow_rank else 0.0
    waits_s = _LATE_S - late_s if slow_rank is not None else 0.0
    steps, spans, calls = [], [], []
    now = 17.5
    for number in range(3, 3 + num_steps):
        begin = now
        load_s = data_s * (1 + (rank * 7 + number) % 5 / 10)
        lengths = {
            "data": load_s,
            "forward": 0.080 + late_s,
            "backward": 0.140 + waits_s + 1.4 * data_s - load_s,
            "optimizer": 0.022,
        }
        for region, dur_s in lengths.items():
            spans.append(NamedEvent(region, region, now, dur_s))
            if region == "backward":
                calls += _buckets(now, dur_s, number, num_ranks, num_buckets, waits_s)
            now += dur_s
        times = Times(
            data_s=load_s,
            forward_s=lengths["forward"],
            backward_s=lengths["backward"] - waits_s - 0.006,
            optimizer_s=lengths["optimizer"],
            comm_exposed_s=waits_s + 0.006,
            comm_hidden_s=0.031,
        )
        steps.append(Step(number, begin, times))
    return RankTrace(
        rank=rank,
        world_size=num_ranks,
        path=f"traces/rank{rank:05d}-of-{num_ranks:05d}.json.gz",
        host=f"nid{1000 + rank // 4:06d}",
        device="cpu",
        steps=tuple(steps),
        named=tuple(spans),
        collectives=tuple(calls),
        ops=tuple(Op(name, 96, self_s * 1.2, self_s * (1 + rank / 100)) for name, self_s in _OPS.items()),
        kernels=(),
        memory=(
            Memory(
                "cpu",
                (311 + rank) * _MIB,
                0,
                3,
                "forward > aten::mm",
                ((), (), ()),
            ),
        ),
        num_events=24_187,
        notes=(),
    )


def _buckets(
    begin_s: float, dur_s: float, step: int, num_ranks: int, num_buckets: int, waits_s: float
) -> list[Collective]:
    """Returns DDP's all_reduces, one after the other; early ranks wait, and all ranks end together."""
    each_s = (dur_s - waits_s) / (num_buckets + 1)
    return [
        Collective(
            "all_reduce",
            "default_pg",
            num_ranks,
            (25 if number else 1) * _MIB,
            begin_s + each_s * (number + 1),
            0.9 * each_s + waits_s,
            step,
        )
        for number in range(num_buckets)
    ]


def hostile() -> Capture:
    """Returns a capture with markup, control characters and very long names in all texts, and with NaN."""
    plain = made(num_ranks=2, num_steps=2)
    ranks = tuple(
        replace(
            trace,
            host=ENDLESS,
            device=HOSTILE,
            path=HOSTILE,
            collectives=tuple(replace(call, kind=HOSTILE, group=ENDLESS) for call in trace.collectives),
            ops=(Op(HOSTILE, 1, 1.0, 1.0), Op(ENDLESS, 1, 1.0, float("inf")), Op("", 0, 0.0, float("nan"))),
            kernels=(Kernel(ENDLESS, HOSTILE, HOSTILE, 1, 1.0),),
            memory=(Memory(HOSTILE, 2**62, 0, None, ENDLESS, ((17.5,), (2**62,), (0,))),),
        )
        for trace in plain.ranks
    )
    return replace(
        plain,
        name=ENDLESS,
        ranks=ranks,
        mean=replace(plain.mean, idle_s=float("nan")),
        collectives=tuple(replace(row, kind=ENDLESS, group=HOSTILE) for row in plain.collectives),
        findings=(HOSTILE, ENDLESS),
        notes=(HOSTILE, *[ENDLESS] * 500),
    )
