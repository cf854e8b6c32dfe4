"""With every strategy, the losses equal those of one process."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.mesh_sizes import parse_mesh
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.optimization.precision import Precision
from ddp_hpc.training.parallel.ddp import Ddp
from ddp_hpc.training.parallel.device_mesh import Mesh
from ddp_hpc.training.parallel.fsdp import Fsdp
from ddp_hpc.training.parallel.pipeline import Pipeline
from ddp_hpc.training.parallel.tensor_parallel import TensorParallel, split_layers
from ddp_hpc.training.tasks.task import Task

from .strategy_rows import BEGIN, END, EXACT, PAGE, ROWS, Row, distance, measure, table
from .tiny import DATA, MODEL, SAVING, trained

# One of each strategy; `make check` runs more, and `make soak` all. The fraction of parameters, gradients and
# the two states of Adam on a rank: zero halves the states, fsdp all four.
SOME = [
    ("`--strategy zero`", 2, 0.75),
    ("`--strategy fsdp --accumulate 2 --clip-norm 0.5`", 2, 0.5),
    ("`--strategy tp`", 2, None),
    pytest.param("`--strategy tp --fused`", 2, None, marks=pytest.mark.check),
    pytest.param("`--strategy tp`, foreach", 2, None, marks=pytest.mark.check),
    ("`--strategy pp --pipeline-schedule 1f1b`", 2, None),
    ("`--mesh dp=2,tp=2`", 4, None),
    pytest.param("`--mesh fsdp=2,tp=2 --fused`", 4, None, marks=pytest.mark.check),
    pytest.param("`--mesh pp=2,tp=2`, foreach", 4, None, marks=pytest.mark.check),
]
# Two epochs with steps of 16, 16 and 6 samples.
FEWER = {"num_samples": 38}


@pytest.fixture(scope="module")
def single(tmp_path_factory, forks):
    """Trains one process with the options in `like` of a row."""

    @cache
    def of(like):
        return measure(
            forks, tmp_path_factory.mktemp("single"), Row(like, (1, 1), like=like), 1, *MODEL, **FEWER
        )

    return of


@pytest.mark.parametrize(("name", "ranks", "share"), SOME)
def test_a_strategy_has_the_losses_of_one_process_and_less_memory(
    name, ranks, share, single, forks, tmp_path
):
    row = next(row for row in ROWS if str(row) == name)
    (home := tmp_path / "home").mkdir()
    found = measure(forks, home, row, ranks, *MODEL, **FEWER)
    assert len(found.losses) == 6
    assert distance(found, single(row.like)) < EXACT
    if share is not None:
        assert found.state_bytes == pytest.approx(share * single("").state_bytes, rel=0.01)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_strategy_and_option_is_documented_and_has_the_losses_of_one_process(forks, tmp_path):
    (_, _, rest) = PAGE.read_text().partition(BEGIN)
    there = rest.partition(END)[0].strip().splitlines()
    found = table(forks, tmp_path).splitlines()

    def but_the_distance(line):
        cells = line.split("|")
        return [*cells[:3], *cells[4:]]

    assert [but_the_distance(line) for line in found] == [but_the_distance(line) for line in there]


@pytest.mark.parametrize(
    "options",
    [
        "--strategy fsdp",
        pytest.param("--strategy pp", marks=pytest.mark.check),
        pytest.param("--strategy zero", marks=pytest.mark.soak),
        pytest.param("--strategy tp --fused", marks=pytest.mark.check),
    ],
)
def test_a_run_goes_on_exactly_as_if_it_had_not_stopped(options, forks, home, tiny_data, tmp_path):
    batch = ["--batch-size", "8"] if {"tp", "pp"} & {*options.split()} else []
    words = [*DATA, *batch, *options.split(), *SAVING, "--max-steps", "5", "--snapshot-every-steps", "3"]
    forks.run(*words, cwd=home, ranks=2)
    whole = trained(home)
    assert [line["epoch"] for line in whole] == [1, 1, 1, 1, 2]
    # Everything after the third step is lost.
    (home / "run" / "step_00000005").rename(home / "step_00000005")
    job = forks.run(*words, cwd=home, ranks=2)
    assert "resuming after step 3" in job.words()
    assert trained(home) == whole


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("dp=3", "--mesh dp=3 needs 3 ranks, but 2 were started"),
        ("fdsp=2", "unknown dimension 'fdsp' (did you mean \"fsdp\"?)"),
        ("dp=x", "dp must be a number of ranks (got 'x')"),
        ("dp=2,dp=1", "dp is given twice"),
    ],
)
def test_invalid_meshes_are_rejected(mesh, words):
    with pytest.raises(RequestError) as caught:
        parse_mesh(mesh, 2)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": "dp=2", "strategy": "fsdp"}, "Remove --strategy fsdp."),
        ({"strategy": "fsdp", "static_graph": True}, "works with --strategy ddp or zero"),
        ({"static_graph": True, "accumulate": 2}, "would omit gradients"),
        ({"check_gradients": True, "amp": "fp16"}, "use --amp bf16"),
        ({"compile": "reduce-overhead", "accumulate": 2}, "Use --compile without a mode, or --cuda-graph"),
        ({"sync_batchnorm": True, "devices_per_rank": 2}, "Remove --devices-per-rank."),
        ({"compile": "default", "devices_per_rank": 2}, "split over devices is not compiled"),
        ({"strategy": "dataparallel", "compile": "default"}, "with the parameters of the first"),
        ({"strategy": "dataparallel", "activation_checkpointing": True}, "or use --strategy ddp"),
        ({"compile": "default", "bucket_mib": 0.5}, "buckets of at least 1 MiB"),
    ],
)
def test_options_that_contradict_each_other_are_rejected(options, words):
    with pytest.raises(RequestError) as caught:
        TrainConfig.of(**options)
    assert words in str(caught.value)


def on_one_rank(kind, model, sizes, device="cpu", **options):
    """The part of a strategy on the first rank of a mesh, without a process group."""
    config, device = TrainConfig.of(**options), torch.device(device)
    group = SimpleNamespace(device=device, world=SimpleNamespace(rank=0), backend="gloo")
    mesh = Mesh(sizes, dict.fromkeys(sizes, 0), None)
    precision = Precision("off", device)
    return kind(Task(model=model), group, config.parallel, config.optimization, precision, mesh)


@pytest.mark.parametrize(
    ("kind", "name", "options", "words"),
    [
        (Fsdp, "fsdp", {"strategy": "fsdp", "cpu_offload": True}, "there is no GPU"),
        (Fsdp, "fsdp", {"strategy": "fsdp", "amp": "fp16"}, "use --amp bf16"),
        (Fsdp, "fsdp", {"strategy": "fsdp", "compile": "reduce-overhead"}, "max-autotune-no-cudagraphs"),
        (TensorParallel, "tp", {"strategy": "tp", "amp": "fp16"}, "use --amp bf16"),
        (TensorParallel, "tp", {"strategy": "tp"}, "has no `tensor_parallel` plan"),
        (Pipeline, "pp", {"strategy": "pp", "compile": "default"}, "omit --compile"),
        (Ddp, "dp", {"sync_batchnorm": True}, "needs GPUs"),
    ],
)
def test_what_a_strategy_does_not_support_is_rejected(kind, name, options, words):
    with pytest.raises(RequestError) as caught:
        on_one_rank(kind, nn.Linear(2, 2), {name: 2}, **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--strategy dataparallel", "Start one process, or use --strategy ddp"),
        ("--compress-gradients bf16", "use fp16"),
        ("--strategy tp --compile", "remove one of them"),
        ("--strategy fsdp --optimizer sgd --fused", "torch has no fused implementation of SGD"),
    ],
)
def test_unsupported_combinations_end_all_ranks_with_one_line(options, words, forks, tmp_path, no_gpu):
    small = ["--num-samples", "8", "--src-shape", "1,8", "--tgt-shape", "2,8", "--epochs", "1"]
    job = forks.start(*small, *options.split(), cwd=tmp_path, ranks=2)
    assert job.wait() == [2, 2], job.words()
    (line,) = job.errors()
    assert words in line
    assert "Traceback" not in job.words()


def test_dataparallel_is_one_process(forks, tmp_path):
    options = ["--num-samples", "8", "--src-shape", "1,8", "--tgt-shape", "2,8", "--epochs", "1"]
    job = forks.run(*options, "--strategy", "dataparallel", cwd=tmp_path, ranks=1)
    assert "strategy: dataparallel" in job.words()
    assert not job.errors()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.check)])
def test_a_single_rank_splits_its_replica_over_several_devices(ranks, forks, tmp_path):
    words = ["--num-samples", "8", "--src-shape", "1,8", "--tgt-shape", "2,8", "--devices-per-rank", "99"]
    job = forks.start(*words, cwd=tmp_path, ranks=ranks)
    assert job.wait() == [2] * ranks
    (line,) = job.errors()
    assert "each of the 99 stages needs at least one" in line or "--devices-per-rank 99: rank" in line


def test_the_state_of_another_optimizer_is_rejected_in_one_line(forks, home, tiny_data):
    forks.run(*DATA, *SAVING, "--optimizer", "sgd", "--max-steps", "1", cwd=home, ranks=1)
    job = forks.start(*DATA, *SAVING, "--epochs", "1", cwd=home, ranks=1)
    assert job.wait() == [2]
    (line,) = job.errors()
    assert "was made with the optimizer SGD, not Adam" in line


SPY = """
import os
from dataclasses import replace

from ddp_hpc.training.tasks.builtin_models import transformer


def spied(spec, dropout):
    task = transformer(spec, dropout)

    def forward(model, src, tgt):
        with open(f"seen{os.environ['RANK']}", "a") as file:
            print(task.model.encoder.norm.weight.double().sum().item(), file=file)
        return model(src, tgt)

    return replace(task, forward=forward)
"""


@pytest.mark.check
def test_ranks_that_share_samples_draw_the_same_dropout_after_a_change_of_strategy(forks, home, tiny_data):
    # Otherwise their unsharded parameters, such as this norm, would silently diverge.
    (home / "spy.py").write_text(SPY)
    words = [*DATA, *SAVING, "--model", "spy:spied", "--dropout", "0.5"]
    forks.run(*words, "--max-steps", "1", cwd=home, ranks=2)
    for seen in home.glob("seen*"):
        seen.unlink()
    job = forks.run(*words, "--strategy", "tp", "--max-steps", "4", cwd=home, ranks=2)
    assert "note: the parallel strategy or the kind of device changed" in job.words()
    first, second = ((home / f"seen{rank}").read_text().split() for rank in (0, 1))
    assert first == second
    assert len(set(first)) > 1


def test_a_stage_saves_the_buffers_on_its_device():
    # `to` replaces the buffers of a module on another device, but keeps its parameters.
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    stage = on_one_rank(Pipeline, model, {"pp": 2}, strategy="pp", device="meta")
    held = stage.state().model
    assert len(held) == len(list(stage.model.parameters())) + len(list(stage.model.buffers()))


def test_layers_that_cannot_be_split_evenly_are_reported():
    model = nn.ModuleDict({"up": nn.Linear(8, 2048)})
    task = Task(model=model, tensor_parallel=lambda _: {"up": ColwiseParallel()})
    with pytest.raises(RequestError, match="up has 2048 outputs, which cannot be divided evenly among 3"):
        split_layers(task, Mesh({"tp": 3}, {"tp": 0}, None), compiles=False)


def test_heads_that_cannot_be_split_evenly_are_reported():
    """Without the check, the shapes of the first forward pass would not match."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(24, 4)})
    plan = {"attention.out_proj": RowwiseParallel()}
    task = Task(model=model, tensor_parallel=lambda _: plan)
    with pytest.raises(RequestError, match="attention has 4 heads, which cannot be divided evenly among 3"):
        split_layers(task, Mesh({"tp": 3}, {"tp": 0}, None), compiles=False)
