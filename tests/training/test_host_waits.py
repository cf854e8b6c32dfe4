"""The host does not read a value of the device inside or between steps.

On a CPU, torch reports each read as an operator (`_local_scalar_dense`) or as a method of a tensor.
"""

import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_hpc.training.health.rank_report import RankReport
from ddp_hpc.training.step import Pending
from ddp_hpc.training.tasks.decoder import decoder
from ddp_hpc.training.tasks.task import SampleSpec, Task
from ddp_hpc.training.telemetry.trace_annotations import annotated

from .one_process import Steps
from .runs import LINEAR, records

TOKENS = SampleSpec((6,), (6,), 10)
READS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__"}
OPTIONS = [
    {},
    {"clip_norm": 0.1},
    {"optimizer": "adamw", "weight_decay": 0.1, "lr_schedule": "cosine", "warmup_steps": 3},
    {"accumulate": 2, "amp": "bf16"},
    {"optimizer": "sgd"},
]


def tokens(device="cpu"):
    while True:
        yield (torch.zeros(4, 6, dtype=torch.int64, device=device),) * 2


class Reads(TorchDispatchMode):
    """Counts the operators that return a value of a tensor to the host."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """Counts the methods of tensors that return values to the host."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (name := getattr(func, "__name__", "")) in READS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def test_the_counters_count_a_read():
    with Reads() as reads, Methods() as methods:
        torch.ones(()).item()
        torch.ones(3).tolist()
    assert reads.counts
    assert methods.counts == {"item": 1, "tolist": 1}


@pytest.mark.parametrize("options", [*OPTIONS, {"amp": "fp16", "clip_norm": 1.0}], ids=str)
def test_steps_call_no_operator_that_reads_a_value(options):
    steps = Steps(decoder(TOKENS, 0.1), tokens(), fused=True, **options)
    steps.step()
    with Reads() as reads, Methods() as methods:
        for _ in range(5):
            steps.step()
    assert not reads.counts + methods.counts


def test_checking_gradients_reads_one_value_per_step():
    # The option stops before an update, so it has to read the norm; this also shows that reads are counted.
    steps = Steps(decoder(TOKENS, 0.1), tokens(), fused=True, check_gradients=True)
    with Methods() as methods:
        for _ in range(5):
            steps.step()
    assert methods.counts == {"item": 5}


def _clock():
    """A clock of which each step takes a second."""
    clock = SimpleNamespace(own_s=0.1, num=0)
    clock.read = lambda kept: [(0.0, 1.0)] * (clock.num - kept)
    return clock


def test_losses_are_sent_without_a_read_and_exclude_the_running_step():
    pending, clock = Pending(delay=1), _clock()
    group = Steps(Task(model=nn.Linear(1, 1)), iter(())).group

    def report(step_s):
        return RankReport(0.0, 0.0, step_s, 0.1)

    for step in range(1, 4):
        pending.losses.append(torch.tensor(float(step)))
        pending.records.append({"step": step, "epoch": 1, "lr": 0.1, "samples": 1})
        clock.num += 1
    with Reads() as reads, Methods() as methods:
        pending.send(group, clock, report, whole=False)
    assert not reads.counts + methods.counts
    assert [record.loss for record in pending.receive().records] == [1.0, 2.0]
    clock.num = 1
    pending.send(group, clock, report, whole=False)
    assert not pending.is_sent, "only the running step is left"
    pending.send(group, clock, report, whole=True)
    assert [record.step for record in pending.receive().records] == [3]


def _metrics(path):
    return [{key: value for key, value in one.items() if not key.endswith("_s")} for one in records(path)]


RUN = [*LINEAR, "--num-samples", "100", "--batch-size", "4", "--epochs", "1", "--dropout", "0"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_that_are_read_a_step_later_are_the_same(ranks, forks, tmp_path):
    for name, program in (("now", "ddp_hpc.train"), ("later", "tests.training.delayed")):
        words = [*RUN, "--metrics", f"{name}.jsonl", "--log-every", "3"]
        assert forks.start(*words, cwd=tmp_path, ranks=ranks, program=program).wait(60) == [0] * ranks
    now, later = (_metrics(tmp_path / f"{name}.jsonl") for name in ("now", "later"))
    assert len(now) == 25 // ranks + (25 % ranks > 0)
    assert later == now


def test_a_run_that_reads_losses_later_resumes_with_complete_metrics(forks, tmp_path):
    saving = ["--snapshot-dir", "run", "--snapshot-every-steps", "5", "--metrics", "later.jsonl"]
    for steps in ("7", "25"):
        words = [*RUN, *saving, "--max-steps", steps]
        job = forks.start(*words, cwd=tmp_path, ranks=1, program="tests.training.delayed")
        assert job.wait(60) == [0], job.words()
    forks.run(*RUN, "--metrics", "now.jsonl", cwd=tmp_path, ranks=1)
    assert _metrics(tmp_path / "later.jsonl") == _metrics(tmp_path / "now.jsonl")


@pytest.mark.parametrize("program", ["ddp_hpc.train", "tests.training.delayed"])
def test_log_every_logs_the_requested_steps(program, forks, tmp_path):
    job = forks.start(*RUN, "--log-every", "10", cwd=tmp_path, ranks=1, program=program)
    assert job.wait(60) == [0]
    assert re.findall(r" step (\d+)/25 ", job.words()) == ["1", "10", "20", "25"]


def test_parts_of_a_step_are_named_only_while_a_profiler_records():
    assert not isinstance(annotated("forward"), torch.profiler.record_function)
    with torch.profiler.profile() as profiler, annotated("a part"):
        torch.ones(1)
    assert "a part" in {event.key for event in profiler.key_averages()}
