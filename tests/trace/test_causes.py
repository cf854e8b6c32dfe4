"""The parts of a step and the causes of idle time: by benchmarks/trace_oracle.py, by hand, and recorded."""

import json
import random

import pytest

from benchmarks.trace_oracle import COLUMNS, truth
from ddp_hpc.trace import tables
from ddp_hpc.trace.analysis_results import REGIONS
from ddp_hpc.trace.summarize_run import read_capture
from tests.trace import accumulated
from tests.trace.made import annotation, event, write

US = 1e-6
STEP = "ProfilerStep#{}"
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
NODE = "autograd::engine::evaluate_function: MmBackward0"


def kernel(number, start_us, dur_us, name="gemm", stream=9, cat="kernel", **more):
    return event(cat, name, start_us, dur_us, stream, correlation=number, **more)


def call(number, start_us, dur_us=1, tid=1, name="cudaLaunchKernel", cat="cuda_runtime"):
    return event(cat, name, start_us, dur_us, tid, correlation=number)


class RandomTrace:
    """A program on a GPU with random times: late launches, long calls, streams, graphs, missing launches."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.events = []
        self.now = 1000.0
        self.ready = {7: 0.0, 8: 0.0, 9: 0.0}  # the time at which each stream is idle
        self.number = 0

    def between(self, least, most):
        return round(self.random.uniform(least, most), self.random.choice((0, 3)))

    def region(self, category, name, tid=1, launches=4):
        begun = self.now
        for _ in range(self.random.randint(0, launches)):
            self.now += self.random.choice((0, self.between(0, 5), self.between(0, 300)))
            self.launch(tid)
        self.now += self.between(0, 20)
        self.events.append(event(category, name, begun, self.now - begun, tid))

    def launch(self, tid):
        self.number += 1
        took = self.random.choice((self.between(1, 6), self.between(1, 200)))
        is_graph = self.random.random() < 0.1
        if self.random.random() < 0.95:
            self.events.append(call(self.number, self.now, took, tid))
            if self.random.random() < 0.1:  # the driver's call within that of the runtime
                self.events.append(call(self.number, self.now + took / 4, took / 2, tid, cat="cuda_driver"))
        for _ in range(5 if is_graph else 1):
            stream = self.random.choice(list(self.ready))
            start = max(self.ready[stream], self.now + self.between(0, took + 30))
            dur = self.random.choice((0, self.between(0, 10), self.between(0, 150)))
            name, category = self.random.choice(
                [("gemm", "kernel")] * 4
                + [("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel"), ("Memcpy HtoD", "gpu_memcpy")]
            )
            self.events.append(kernel(self.number, start, dur, name, stream, category))
            self.ready[stream] = start + dur
        self.now += took

    def step(self, number):
        begun = self.now
        for _ in range(self.random.randint(1, 3)):
            self.region("user_annotation", LOADER, launches=1)
            self.region("user_annotation", "forward")
            self.region("cpu_op", "aten::mm")
            for _ in range(3):
                self.region("cpu_op", NODE, tid=2)
                self.now += self.between(0, 10)
                self.launch(2)  # of a hook
        self.region("user_annotation", "Optimizer.step#SGD.step")
        if self.random.random() < 0.3:
            self.region("user_annotation", "snapshot")
        self.events.append(annotation(STEP.format(number), begun, self.now - begun))
        self.now += self.between(0, 3)


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(8, 100))]
)
def test_random_programs_on_a_gpu_have_the_times_of_the_oracle(tmp_path, seed):
    made = RandomTrace(seed)
    for number in range(4):
        made.step(number)
    path = write(tmp_path / "t.json", made.events)
    want, times = truth(path), read_capture(path).mean
    for name in COLUMNS:
        assert getattr(times, f"{name}_s") == pytest.approx(want[name], abs=1e-3 * want["wall"]), name


def test_a_gap_is_divided_at_the_start_and_the_end_of_the_launch_call(tmp_path):
    events = [annotation(STEP.format(0), 0, 3_000_000)]
    events += [call(1, 0), kernel(1, 1, 9)]
    events += [call(2, 50, 10), kernel(2, 463_060, 40)]  # launched 40 us late, and started 463 ms later
    events += [call(3, 463_090, 1_565_000), kernel(3, 2_028_090, 971_910)]  # a call of 1.6 s
    times = read_capture(write(tmp_path / "t.json", events)).mean
    assert times.idle_host_s == pytest.approx(40 * US)
    assert times.idle_launch_s == pytest.approx((1 + 10 + 1_564_990) * US)
    assert times.idle_kernel_s == pytest.approx(463_000 * US)


def test_a_region_that_is_recorded_as_an_operator_is_not_one_block_per_step(tmp_path):
    events = [annotation(STEP.format(0), 0, 1000)]
    for start in (0, 500):
        events += [event("Operator", LOADER, start, 100), event("Operator", "aten::mm", start + 100, 150)]
        events += [event("Operator", "MmBackward", start + 250, 100)]
    times = read_capture(write(tmp_path / "t.json", events)).mean
    assert (times.data_s, times.backward_s) == (pytest.approx(200 * US), pytest.approx(200 * US))
    assert (times.other_s, times.idle_s) == (pytest.approx(300 * US), pytest.approx(300 * US))


def test_data_and_snapshots_of_other_threads_delay_no_step(tmp_path):
    events = [annotation(STEP.format(0), 0, 100), annotation("forward", 10, 90)]
    events += [
        annotation("data", 0, 10),
        annotation("data", 0, 80, tid=5),
        annotation("snapshot", 0, 90, tid=6),
    ]
    times = read_capture(write(tmp_path / "t.json", events)).mean
    assert times.data_s == pytest.approx(10 * US)
    assert (times.forward_s, times.snapshot_s) == (pytest.approx(90 * US), 0)


def test_a_device_shows_each_forward_pass_of_a_step(tmp_path):
    events = [annotation(STEP.format(0), 0, 100)]
    for i, region in enumerate(["forward", "backward"] * 2):
        events += [annotation(region, 10 * i, 10), call(2 * i, 10 * i), call(2 * i + 1, 10 * i + 5)]
        events += [kernel(2 * i, 20 * i + 5, 8), kernel(2 * i + 1, 20 * i + 15, 8)]
    (trace,) = read_capture(write(tmp_path / "t.json", events)).ranks
    spans = [event for event in trace.named if event.kind in REGIONS]
    begins = [(span.name, round((span.start_s - trace.steps[0].start_s) / US)) for span in spans]
    assert begins == [
        ("forward", 5), ("forward", 15), ("backward", 25), ("backward", 35),
        ("forward", 45), ("forward", 55), ("backward", 65), ("backward", 75),
    ]  # fmt: skip
    assert [span.dur_s for span in spans] == [pytest.approx(8 * US)] * 8


def test_calls_that_only_launch_a_collective_are_no_communication(tmp_path):
    events = [annotation(STEP.format(0), 0, 100), annotation("forward", 0, 100)]
    events += [annotation("nccl:all_reduce", 50, 10), annotation("hccl:allgather", 70, 10)]
    capture = read_capture(write(tmp_path / "t.json", events, size=2))
    assert (capture.collectives, capture.mean.comm_exposed_s) == ((), 0)
    assert capture.mean.forward_s == pytest.approx(100 * US)


def test_the_critical_path_is_not_longer_than_the_step(tmp_path):
    """Rank 1 begins the step earlier, and rank 0 waits for it."""
    nccl = {"Collective name": "allreduce", "In msg nelems": 4, "dtype": "Float", "Group size": 2}
    for rank, begin in enumerate((100, 0)):
        events = [annotation(STEP.format(0), begin, 20), *(call(i, begin + i) for i in range(3))]
        events += [kernel(0, begin + 10, 190 * rank + 10), kernel(2, 400, 100 - rank)]
        begun = begin + 20 + 190 * rank
        events += [kernel(1, begun, 400 - begun, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, **nccl)]
        write(tmp_path / f"r{rank}.json", events, rank, 8)
    capture = read_capture(tmp_path)
    assert capture.ranks[0].steps[0].times.wall_s == pytest.approx(400 * US)
    assert capture.path.total_s == pytest.approx(400 * US, abs=US)
    assert (capture.path.begin_rank, capture.path.end_rank) == (1, 0)


def test_the_queue_of_an_mtia_is_a_device(tmp_path):
    events = [annotation(STEP.format(0), 0, 100), annotation("forward", 0, 100)]
    events += [call(1, 10, 5, name="runFunction", cat="mtia_runtime")]
    events += [kernel(1, 20, 30, "fc-dtype_Float", cat="mtia_ccp_events")]
    events += [event("mtia_ccp_events", "event_wait", 0, 90), event("mtia_ccp_events", "dma_request", 60, 10)]
    (trace,) = read_capture(write(tmp_path / "t.json", events)).ranks
    (step,) = trace.steps
    assert trace.device == "mtia"
    assert (step.times.forward_s, step.times.memcpy_s) == (pytest.approx(30 * US), pytest.approx(10 * US))


@pytest.mark.parametrize("device", ["xpu", "privateuse1"])
def test_devices_with_a_runtime_of_their_own_are_read(tmp_path, device):
    events = [annotation(STEP.format(0), 0, 100), annotation("forward", 0, 10)]
    events += [call(1, 5, 2, name="urEnqueueKernelLaunch", cat=f"{device}_runtime"), kernel(1, 20, 30)]
    (trace,) = read_capture(write(tmp_path / "t.json", events)).ranks
    assert (trace.device, trace.steps[0].times.forward_s) == (device, pytest.approx(30 * US))


def test_without_marks_a_step_is_the_time_between_two_updates(tmp_path):
    events = [call(0, 0, 9000), kernel(0, 9000, 10)]  # the start of the program
    for i in range(4):
        at = 10_000 + 100 * i
        events += [annotation(LOADER, at, 40), annotation("Optimizer.step#SGD.step", at + 80, 20)]
        events += [call(1 + i, at + 45), kernel(1 + i, at + 50, 50)]
    capture = read_capture(write(tmp_path / "t.json", events))
    assert [step.times.wall_s for step in capture.ranks[0].steps] == [pytest.approx(100 * US)] * 3
    assert capture.mean.data_s == pytest.approx(40 * US)
    assert capture.findings[0].startswith(
        "A step, from the end of one Optimizer.step to that of the next, takes 100 us: 50% "
        "computation not assigned to forward, backward or optimizer"
    )
    assert any("the time before the first one is not counted" in note for note in capture.notes)
    assert capture.findings[-1] == (
        "Before the first step, which counts in no other number here, the host spends 10.1 ms: 9 ms in "
        "cudaLaunchKernel, 1.04 ms in Python, or code that was not recorded."
    )


def test_the_longest_gaps_contain_those_before_the_first_step(tmp_path):
    events = [call(8, 0), kernel(8, 5, 10), call(9, 700), kernel(9, 705, 10)]
    for i in range(3):
        at = 1000 + 100 * i
        events += [annotation(f"ProfilerStep#{i}", at, 100), call(i, at + 30), kernel(i, at + 35, 60)]
    rows = tables.gaps(read_capture(write(tmp_path / "t.json", events))).rows
    assert [(row["step"], row["num_gaps"], round(row["dur_s"] * 1e6)) for row in rows[:1]] == [(None, 2, 690)]
    assert {row["step"] for row in rows} - {None} <= {0, 1, 2}


def test_a_recording_without_steps_begins_with_its_first_kernel(tmp_path):
    """What the device did before is unknown: it may have run work that was launched before the recording."""
    events = [event("cpu_op", "aten::empty", 0, 9000), call(0, 100, 10), kernel(0, 8990, 10)]
    events += [call(1, 9000, 10), kernel(1, 9030, 60)]
    capture = read_capture(write(tmp_path / "t.json", events))
    assert capture.findings[0] == (
        "The recording, in which no steps are marked, takes 100 us: 70% "
        "computation not assigned to forward, backward or optimizer, 30% idle (20% kernel queued, 10% launch "
        "call)."
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, forks):
    directory = tmp_path_factory.mktemp("accumulated")
    job = forks.start(str(directory), cwd=directory, ranks=1, program="tests.trace.accumulated")
    assert job.wait() == [0], job.words()
    return directory, json.loads((directory / "measured.json").read_text())


@pytest.mark.parametrize("name", ["marked", "unmarked"])
def test_a_recording_has_the_times_that_the_program_measured(recorded, name):
    directory, measured = recorded
    capture = read_capture(directory / f"{name}.pt.trace.json")
    load_s, backward_s = measured[name]
    assert len(capture.ranks[0].steps) == accumulated.NUM_STEPS
    # The program's times contain those of the recording, and delays by other processes beside them.
    slept_s = accumulated.NUM_BATCHES * accumulated.LOAD_S
    assert 0.99 * slept_s <= capture.mean.data_s <= 1.01 * load_s
    assert 0 < capture.mean.backward_s <= 1.01 * backward_s
    trace = capture.ranks[0]
    spans = [
        event
        for event in trace.named
        if event.kind == "backward" and trace.step_at(event.start_s) is not None
    ]
    assert len(spans) == accumulated.NUM_STEPS * accumulated.NUM_BATCHES, "one for each backward pass"


@pytest.mark.parametrize("name", ["marked", "unmarked"])
def test_a_recording_has_the_times_of_the_oracle(recorded, name):
    path = recorded[0] / f"{name}.pt.trace.json"
    want, times = truth(path), read_capture(path).mean
    for column in COLUMNS:
        assert getattr(times, f"{column}_s") == pytest.approx(want[column], abs=1e-3 * want["wall"]), column


def test_kernels_that_were_launched_before_the_recording_do_not_lengthen_the_first_step(tmp_path):
    events = [event("user_annotation", STEP.format(number), 100 * number, 100, 1) for number in (1, 2)]
    events += [kernel(3, 90, 30), kernel(4, 120, 30), kernel(10, 150, 40), kernel(11, 205, 40)]
    events += [call(10, 110), call(11, 202)]
    capture = read_capture(write(tmp_path / "a.json", events))
    assert [step.times.wall_s for step in capture.ranks[0].steps] == pytest.approx([50 * US, 100 * US])
    assert [step.times.other_s for step in capture.ranks[0].steps] == pytest.approx([40 * US, 40 * US])
