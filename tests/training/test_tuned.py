"""`--tuned` on simulated GPUs: it picks what the other options allow, and says why it omits the rest."""

from dataclasses import replace

import pytest

from ddp_hpc.training import tuned_options
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.tuned_options import choose_tuned

from .one_process import group_on
from .runs import LINEAR


def chosen(monkeypatch, *, bf16=True, backend="nccl", **options):
    monkeypatch.setattr(tuned_options, "_has_bf16", lambda _: bf16)
    group = replace(group_on("cuda"), backend=backend)
    return choose_tuned(TrainConfig.of(tuned=True, **options), group)


def test_all_options_are_chosen_where_nothing_excludes_them(monkeypatch):
    found = chosen(monkeypatch)
    optimization = found.config.optimization
    assert (optimization.compile, optimization.amp, optimization.cuda_graph) == (None, "bf16", True)
    assert optimization.matmul_precision == "high"
    assert found.line == "--tuned: --amp bf16, --matmul-precision high, --cuda-graph"


@pytest.mark.parametrize(
    ("options", "omitted"),
    [
        ({"bf16": False}, "no --amp bf16 (a GPU does not support bfloat16)"),
        ({"dtype": "float64"}, "no --amp bf16 (--dtype float64)"),
        ({"backend": "gloo"}, "no --cuda-graph (--backend gloo)"),
        ({"strategy": "fsdp"}, "no --cuda-graph (--strategy fsdp: only steps of --strategy ddp"),
        ({"optimizer": "sgd"}, "no --cuda-graph (--optimizer sgd, which torch cannot capture"),
        ({"check_gradients": True}, "no --cuda-graph (--check-gradients, which reads a value"),
        ({"compile": "reduce-overhead"}, "no --cuda-graph (--compile reduce-overhead"),
        ({"name": "mine:net"}, "no --cuda-graph (your own model may copy values from the GPU"),
    ],
    ids=str,
)
def test_an_option_that_is_not_possible_is_omitted_with_its_reason(monkeypatch, options, omitted):
    found = chosen(
        monkeypatch, **{("model" if key == "name" else key): value for key, value in options.items()}
    )
    assert omitted in found.line
    name = omitted.split()[1].removeprefix("--").replace("-", "_")
    untouched = TrainConfig.of(tuned=True).optimization
    if name not in options:
        assert getattr(found.config.optimization, name) == options.get(name, getattr(untouched, name))


def test_options_that_are_set_are_kept(monkeypatch):
    found = chosen(monkeypatch, amp="fp16", compile="max-autotune-no-cudagraphs", matmul_precision="highest")
    optimization = found.config.optimization
    assert (optimization.amp, optimization.compile) == ("fp16", "max-autotune-no-cudagraphs")
    assert optimization.matmul_precision == "highest"
    assert (
        found.line
        == "--tuned: no --cuda-graph (--amp fp16, whose loss scale changes on the host. Use --amp bf16)"
    )


def test_one_rank_without_bfloat16_decides_for_all(monkeypatch):
    group = replace(group_on("cuda"), backend="nccl")
    combine = {"combine": lambda self, own, rule: rule([own, [True, False]]), "bcast": lambda self, own: own}
    monkeypatch.setattr(tuned_options, "_has_bf16", lambda _: True)
    found = choose_tuned(TrainConfig.of(tuned=True), replace(group, comm=type("Comm", (), combine)()))
    assert found.config.optimization.amp == "off"


def test_on_a_cpu_nothing_is_chosen_and_the_log_says_so(tmp_path, forks):
    job = forks.run(*LINEAR, "--num-samples", "32", "--epochs", "1", "--tuned", cwd=tmp_path, ranks=1)
    assert "--tuned changes nothing, because it needs CUDA devices, not cpu" in job.words()


def test_a_graph_without_a_gpu_is_refused_in_one_line(tmp_path, forks):
    job = forks.start(*LINEAR, "--cuda-graph", cwd=tmp_path, ranks=1)
    assert job.wait() == [2]
    [line] = job.errors()
    assert "--cuda-graph needs a CUDA device, but this rank uses cpu; omit it" in line
    assert not (tmp_path / "data").exists()
