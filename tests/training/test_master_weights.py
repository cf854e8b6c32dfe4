"""`--param-dtype bf16` and `--moment-dtype bf16`, compared with torch's own optimizers in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_hpc.base.errors import RequestError
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.optimization import master_weights
from ddp_hpc.training.optimization.gradients import clip_factor, global_norm
from ddp_hpc.training.optimization.master_weights import Adam, AdamW, to_bf16
from ddp_hpc.training.tasks.task import Task
from ddp_hpc.training.tuned_options import choose_tuned

from .one_process import Steps, group_on
from .runs import losses
from .tiny import DATA, EVERY_STEP, MODEL, assert_equal, make_home

BOTH = ["--param-dtype", "bf16", "--moment-dtype", "bf16"]
# Differences of losses of about 2 between bfloat16 and float32, which have 8 and 24 bits of precision.
HALF = 5e-2


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3), nn.LayerNorm(3))


def pair(torchs, **options):
    """A model in bfloat16 with its optimizer, and float32 copies of its parameters with torch's optimizer."""
    model = net()
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    masters = to_bf16(model)
    mine = {torch.optim.Adam: Adam, torch.optim.AdamW: AdamW}[torchs]
    optimizer = mine(
        [masters.get(p, p) for p in model.parameters()],
        trained={master: parameter for parameter, master in masters.items()},
        **options,
    )
    return model, optimizer, copies, torchs(copies, **{"foreach": not options.get("fused"), **options})


@pytest.mark.parametrize("most_values", [2**24, 20])
@pytest.mark.parametrize("torchs", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
def test_master_weights_equal_the_parameters_of_torchs_optimizer_bit_for_bit(
    fused, torchs, most_values, monkeypatch
):
    monkeypatch.setattr(master_weights, "_MOST_VALUES", most_values)
    model, optimizer, copies, oracle = pair(torchs, lr=0.01, weight_decay=0.1, fused=fused)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        for parameter, copy in zip(model.parameters(), copies, strict=True):
            copy.grad = parameter.grad.float()
        optimizer.step()
        oracle.step()
        own = [master for group in optimizer.param_groups for master in group["params"]]
        for parameter, master, copy in zip(model.parameters(), own, copies, strict=True):
            assert torch.equal(master, copy)
            assert torch.equal(parameter, copy.to(parameter.dtype))
            for key, value in oracle.state[copy].items():
                assert torch.equal(optimizer.state[master][key], value), key


def test_parameters_without_a_gradient_are_not_updated():
    model, optimizer, copies, _ = pair(torch.optim.AdamW, lr=0.01)
    model[0](torch.randn(4, 8).bfloat16()).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 2
    assert torch.equal(model[3].weight.float(), copies[4].bfloat16().float())


def test_gradients_are_clipped_in_float32_like_those_of_torch():
    model, optimizer, copies, oracle = pair(torch.optim.AdamW, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (100 * model(torch.randn(4, 8)).square().sum()).backward()
        for parameter, copy in zip(model.parameters(), copies, strict=True):
            copy.grad = parameter.grad.float()
        norm = global_norm(model.parameters())
        assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(copies, 1.5).item(), rel=1e-6)
        optimizer.grad_factor = clip_factor(norm, 1.5)
        optimizer.step()
        oracle.step()
    own = [master for group in optimizer.param_groups for master in group["params"]]
    torch.testing.assert_close(own, copies, rtol=1e-5, atol=1e-6)


def test_batch_norms_and_outputs_are_in_float32_and_all_else_in_bfloat16():
    model = net()
    model[3].register_buffer("table", torch.ones(2))
    seen = []
    model[0].register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0].dtype, output.dtype]))
    to_bf16(model)
    assert model(torch.randn(4, 8)).dtype == torch.float32
    assert seen == [torch.bfloat16] * 2
    kept = {name for name, value in model.state_dict().items() if value.dtype == torch.float32}
    assert kept == {"1.weight", "1.bias", "1.running_mean", "1.running_var"}
    assert model[3].table.dtype == torch.bfloat16


def second_moments(num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """exp_avg_sq in bfloat16 and in float32, after gradients that become ten times smaller."""
    stream = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.zeros(64, 16)) for _ in range(2)]
    mine, oracle = AdamW(weights[:1], moment_dtype=torch.bfloat16), torch.optim.AdamW(weights[1:])
    for step in range(num_steps):
        grad = torch.randn(64, 16, generator=stream) * (0.1 if step > 300 else 1.0)
        grad[0] = 0.0
        weights[0].grad, weights[1].grad = grad.clone(), grad
        mine.step()
        oracle.step()
    assert mine.state[weights[0]]["exp_avg_sq"].dtype == torch.bfloat16
    found, expected = mine.state[weights[0]]["exp_avg_sq"].float(), oracle.state[weights[1]]["exp_avg_sq"]
    assert not found[0].any(), "values that are zero stay zero"
    return found[1:], expected[1:]


def test_moments_in_bfloat16_follow_those_in_float32_when_gradients_become_smaller():
    found, expected = second_moments(1500)
    assert found.mean().item() == pytest.approx(expected.mean().item(), rel=0.03)
    torch.testing.assert_close(found, expected, rtol=0.15, atol=0.0)


def test_a_state_is_saved_and_loaded_bit_for_bit_and_a_float32_one_is_rounded():
    weight = nn.Parameter(torch.randn(4, 4))
    optimizers = [AdamW([weight], moment_dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    weight.grad = torch.randn(4, 4)
    for optimizer in optimizers:
        optimizer.step()
    half, whole = (optimizer.state[weight]["exp_avg_sq"].clone() for optimizer in optimizers)
    optimizers[0].load_state_dict(optimizers[0].state_dict())
    assert torch.equal(optimizers[0].state[weight]["exp_avg_sq"], half)
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    assert torch.equal(optimizers[0].state[weight]["exp_avg_sq"], whole.bfloat16())


@pytest.mark.parametrize("overflows", [False, True])
def test_an_update_with_the_loss_scale_of_fp16_equals_torchs(overflows):
    weights = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    mine = AdamW(weights[:1], moment_dtype=torch.bfloat16, fused=True)
    oracle = torch.optim.AdamW(weights[1:], fused=True)
    for weight, optimizer in zip(weights, (mine, oracle), strict=True):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(weight.square().sum() * (torch.inf if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(*weights)
    assert torch.equal(weights[0], torch.ones(4, 4)) is overflows


@pytest.mark.parametrize(
    ("options", "bytes_each"),
    [
        ({}, 16),
        ({"param_dtype": "bf16"}, 2 + 2 + 4 + 8),
        ({"moment_dtype": "bf16"}, 4 + 4 + 4),
        ({"param_dtype": "bf16", "moment_dtype": "bf16"}, 2 + 2 + 4 + 4),
    ],
)
def test_the_bytes_of_all_copies_are_counted(options, bytes_each):
    def batches():
        yield torch.rand(4, 20), torch.rand(4, 30)

    steps = Steps(Task(model=nn.Linear(20, 30)), batches(), **options)
    steps.step(4)
    of_counts = 2 * 4  # Adam counts the steps of each of the two parameters
    # Gradients are set to None after the update.
    of_gradients = 21 * 30 * (2 if "param_dtype" in options else 4)
    assert steps.strategy.state_bytes() in (
        21 * 30 * bytes_each + of_counts,
        21 * 30 * bytes_each + of_counts - of_gradients,
    )


@pytest.fixture(scope="module")
def float32(tmp_path_factory, tiny_data, forks):
    """The losses of an epoch in float32 on 2 ranks, with and without clipping."""
    homes = {clip: make_home(tmp_path_factory.mktemp("float32"), tiny_data) for clip in ("", CLIP)}
    return {clip: losses_of(forks, home, clip) for clip, home in homes.items()}


CLIP = "--clip-norm 0.5"


def checked(*rows):
    """Rows that only `make check` runs."""
    return [pytest.param(row, marks=pytest.mark.check) for row in rows]


def losses_of(forks, home, options):
    words = [*MODEL, "--data", "train.h5", "--batch-size", "4", "--dropout", "0", "--epochs", "1"]
    words += ["--accumulate", "2"]
    job = forks.start(*words, *options.split(), "--metrics", "m.jsonl", cwd=home, ranks=2)
    assert job.wait(300) == [0, 0], job.words()
    return losses(home / "m.jsonl")


@pytest.mark.parametrize(
    "options",
    [
        "--param-dtype bf16 --clip-norm 0.5 --check-gradients --fused --optimizer adamw --weight-decay 0.01",
        "--moment-dtype bf16 --strategy fsdp --clip-norm 0.5 --amp bf16",
        *checked(
            "--param-dtype bf16 --activation-checkpointing --bucket-mib 1 --find-unused-parameters",
            "--param-dtype bf16 --moment-dtype bf16 --devices-per-rank 2",
            "--moment-dtype bf16 --compress-gradients fp16 --clip-norm 0.5 --fused",
            "--moment-dtype bf16 --amp fp16 --fused",
            "--moment-dtype bf16 --strategy zero --clip-norm 0.5",
            "--moment-dtype bf16 --strategy fsdp --fused",
            "--moment-dtype bf16 --strategy tp --batch-size 8",
            "--moment-dtype bf16 --strategy pp --batch-size 8",
        ),
    ],
)
def test_runs_in_bfloat16_have_losses_close_to_those_in_float32(options, float32, forks, home):
    found, expected = losses_of(forks, home, options), float32[CLIP if CLIP in options else ""]
    assert len(found) == len(expected) == 4
    assert found == pytest.approx(expected, abs=HALF)
    assert found != expected


# Compilation takes longest: `make check` compiles on one rank, and `make soak` also with DDP.
@pytest.mark.parametrize(
    ("option", "ranks"),
    [
        ("--static-graph", 2),
        pytest.param("--compile", 1, marks=pytest.mark.check),
        pytest.param("--compile", 2, marks=pytest.mark.soak),
    ],
)
def test_other_options_do_not_change_the_losses_in_bfloat16(option, ranks, forks, home):
    words = ["--data", "train.h5", "--model", "linear", "--epochs", "2", *BOTH, "--metrics"]
    for name, more in (("plain.jsonl", []), ("m.jsonl", [option])):
        job = forks.start(*words, name, *more, cwd=home, ranks=ranks)
        assert job.wait(300) == [0] * ranks, job.words()
    assert losses(home / "m.jsonl") == pytest.approx(losses(home / "plain.jsonl"), rel=1e-2)


@pytest.mark.parametrize(
    "options", ["--param-dtype bf16 --moment-dtype bf16", *checked("--moment-dtype bf16 --strategy fsdp")]
)
def test_a_run_in_bfloat16_resumes_bit_for_bit(options, home, tiny_data, forks):
    options = [*DATA, *EVERY_STEP, *options.split(), "--epochs", "1"]
    whole = make_home(home / "whole", tiny_data)
    forks.run(*options, cwd=whole, ranks=2)
    forks.run(*options, "--max-steps", "2", cwd=home, ranks=2)
    forks.run(*options, cwd=home, ranks=2)
    assert_equal(home, whole, 4)


BUFFER = """
import torch
from torch import nn
from ddp_hpc.training.tasks.task import Task


class Net(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) + self.table


def net():
    model = Net(4, 4)
    model.register_buffer("table", torch.ones(4))
    numbers = torch.rand(8, 4, generator=torch.Generator().manual_seed(1))
    return Task(model=model, dataset=(numbers, numbers.flip(0)))
"""


def test_a_snapshot_whose_buffers_have_another_data_type_is_rejected_in_one_line(forks, tmp_path):
    (tmp_path / "mine.py").write_text(BUFFER)
    words = ["--model", "mine:net", "--batch-size", "4", "--snapshot-dir", "run"]
    forks.run(*words, *BOTH, "--epochs", "1", cwd=tmp_path, ranks=1)
    forks.run(*words, *BOTH, "--epochs", "2", cwd=tmp_path, ranks=1)
    job = forks.start(*words, "--epochs", "3", cwd=tmp_path, ranks=1)
    assert job.wait() == [2]
    [line] = job.errors()
    assert "table is (4,) bfloat16 in the snapshot, (4,) float32 in the model" in line


RANDOM = """
import os
import torch
from torch import nn
from ddp_hpc.training.tasks.task import Task


def net():
    torch.manual_seed(int(os.environ["RANK"]))  # the ranks begin with different parameters
    model = nn.Linear(4, 4)
    state = {}

    def forward(model, src, tgt):
        with open(f"seen{os.environ['RANK']}", "a") as file:
            bare = getattr(model, "module", model)
            print([p.double().sum().item() for p in bare.parameters()], file=file)
        return model(src)

    numbers = torch.rand(32, 4, generator=torch.Generator().manual_seed(1))
    return Task(model=model, forward=forward, dataset=(numbers, numbers.flip(0)))
"""


def test_all_ranks_begin_with_the_parameters_of_rank_0_and_stay_equal(forks, tmp_path):
    (tmp_path / "mine.py").write_text(RANDOM)
    words = ["--model", "mine:net", "--batch-size", "4", "--epochs", "2", *BOTH]
    forks.run(*words, cwd=tmp_path, ranks=2)
    first, second = ((tmp_path / f"seen{rank}").read_text().splitlines() for rank in (0, 1))
    assert first == second
    assert len(set(first)) > 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "fsdp"}, "--strategy fsdp: fsdp keeps its shards in float32, and"),
        ({"mesh": "dp=2,fsdp=2"}, "--mesh dp=2,fsdp=2: fsdp keeps its shards in float32"),
        ({"strategy": "zero"}, "Use --strategy fsdp --amp bf16 instead."),
        ({"mesh": "pp=2,tp=2"}, "Use --amp bf16 instead."),
        ({"strategy": "dataparallel"}, "Use --strategy ddp instead."),
        ({"compress_gradients": "fp16"}, "the gradients are already in bfloat16"),
        ({"amp": "fp16"}, "the model already computes in bf16. Remove one of them."),
        ({"optimizer": "sgd"}, "only Adam and AdamW support it"),
    ],
)
def test_unsupported_combinations_are_rejected(options, words):
    with pytest.raises(RequestError) as caught:
        TrainConfig.of(param_dtype="bf16", **options)
    assert words in str(caught.value)


def test_a_model_in_another_type_than_float32_is_rejected():
    with pytest.raises(RequestError, match="is float64; use data in float32"):
        Steps(Task(model=nn.Linear(2, 2).double()), iter(()), moment_dtype="bf16")


def test_tuned_keeps_the_requested_data_type_of_the_parameters(monkeypatch):
    from ddp_hpc.training import tuned_options

    monkeypatch.setattr(tuned_options, "_has_bf16", lambda _: True)
    monkeypatch.setattr(tuned_options, "why_not_compiling", lambda _: "")
    found = choose_tuned(TrainConfig.of(tuned=True, param_dtype="bf16"), group_on("cuda"), 128_000)
    assert (found.config.optimization.param_dtype, found.config.optimization.amp) == ("bf16", "off")
    assert "no --amp bf16 (--param-dtype bf16 cannot be used with --amp bf16" in found.line
    found = choose_tuned(TrainConfig.of(tuned=True), group_on("cuda"), 128_000)
    assert (found.config.optimization.param_dtype, found.config.optimization.moment_dtype) == (None, None)
