"""`ddp-hpc estimate`, compared with the numbers in papers and with real models on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from ddp_hpc.base.errors import RequestError
from ddp_hpc.commands.estimate import command
from ddp_hpc.estimate.memory import (
    GIB,
    STRATEGIES,
    Training,
    activation_bytes,
    fits,
    footprint,
    layer_activation_bytes,
    smallest_ranks,
)
from tests.batch.conftest import clean_environ, run_cli


def words(text: str) -> list[str]:
    return text.split()


# layers, hidden, heads, seq, batch
SHAPES = [(2, 128, 4, 64, 4), (3, 64, 1, 128, 2)]
LLAMA_LIKE = Training(params=7 * 10**9, layers=32, hidden=4096, seq=4096, batch=1, dtype="mixed")
SMALL = words("--params 1e6 --layers 2 --hidden 256 --seq 64 --batch 4")


class Stack(nn.Module):
    """A plain pre-norm Transformer encoder, as PyTorch ships its layers."""

    def __init__(
        self, layers: int, hidden: int, heads: int, vocab: int = 0, checkpointing: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(vocab, hidden) if vocab else None
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                hidden, heads, 4 * hidden, 0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, vocab, bias=False) if vocab else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding:
            x = self.embedding(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.head(x) if self.head else x


def num_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def saved_bytes(model: nn.Module, x: torch.Tensor, *, amp: bool = False) -> int:
    """Bytes of the distinct storages that a forward pass keeps, parameters excluded."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # kept alive, so that no address is reused
        return tensor

    with (
        saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=amp),
    ):
        model(x.requires_grad_())
    return sum(storage.nbytes() for storage in kept.values())


def peak_bytes(work: Any) -> tuple[int, int]:
    """The peak and the final amount of memory that `work` allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    now = top = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            top = max(top, now)
    return top, now


def training_of(model: Stack, shape: tuple[int, ...], **options: Any) -> Training:
    layers, hidden, _, seq, batch = shape
    sizes = {"layers": layers, "hidden": hidden, "seq": seq, "batch": batch}
    return Training(params=num_params(model), **sizes, **options)


# --- against real models


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_parameters_gradients_and_adam_states_are_right_to_the_byte(dtype, torch_dtype):
    model = Stack(2, 64, 4).to(torch_dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 8, 64, dtype=torch_dtype)).sum().backward()
    optimizer.step()
    need = footprint(training_of(model, (2, 64, 4, 8, 2), dtype=dtype, optimizer="adamw"), "single", 1)
    assert need.parameters_bytes == num_bytes(model.parameters())
    assert need.gradients_bytes == num_bytes(parameter.grad for parameter in model.parameters())
    states = optimizer.state.values()
    assert need.optimizer_bytes == num_bytes(
        state[key] for state in states for key in ("exp_avg", "exp_avg_sq")
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_activations_match_those_of_a_real_model(shape):
    layers, hidden, heads, seq, batch = shape
    model = Stack(layers, hidden, heads)
    measured = saved_bytes(model, torch.rand(batch, seq, hidden))
    assert activation_bytes(training_of(model, shape)) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("shape", SHAPES)
def test_checkpointing_keeps_the_inputs_of_layers_and_one_layer_whole(shape):
    layers, hidden, heads, seq, batch = shape
    model = Stack(layers, hidden, heads, checkpointing=True)
    x = torch.rand(batch, seq, hidden)
    # The recomputed layer shares its input with the checkpoint.
    measured = saved_bytes(model, x) + saved_bytes(Stack(1, hidden, heads), x) - x.nbytes
    assert activation_bytes(training_of(model, shape, checkpointing=True)) == pytest.approx(
        measured, rel=0.02
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_autocast_keeps_half_activations_whole_norm_inputs_and_cast_weights(shape):
    layers, hidden, heads, seq, batch = shape
    model = Stack(layers, hidden, heads)
    need = footprint(training_of(model, shape, dtype="amp"), "single", 1)
    measured = saved_bytes(model, torch.rand(batch, seq, hidden), amp=True)
    assert need.activations_bytes + need.cast_weights_bytes == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("dtype", ["fp32", "amp"])
@pytest.mark.parametrize(
    ("shape", "vocab", "checkpointing"),
    [((4, 128, 4, 64, 4), 1000, False), ((4, 128, 4, 64, 4), 1000, True), ((1, 16, 1, 128, 4), 2000, False)],
    ids=["layers", "checkpointing", "logits"],
)
def test_the_estimate_is_slightly_above_the_measured_peak_of_a_step(dtype, shape, vocab, checkpointing):
    layers, hidden, heads, seq, batch = shape
    model = Stack(layers, hidden, heads, vocab, checkpointing)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    x, y = torch.randint(vocab, (batch, seq)), torch.randint(vocab, (batch * seq,))

    def forward_and_backward() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "amp"):
            logits = model(x).view(-1, vocab)
        nn.functional.cross_entropy(logits.float(), y).backward()

    forward_and_backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    top, left = peak_bytes(forward_and_backward)
    step_top, _ = peak_bytes(optimizer.step)
    measured = num_params(model) * (4 + 8) + max(top, left + step_top)

    training = training_of(
        model, shape, vocab=vocab, dtype=dtype, checkpointing=checkpointing, overhead_gib=0.0
    )
    assert measured <= footprint(training, "single", 1).total_bytes <= 1.25 * measured


# --- against the papers


def test_activations_in_sixteen_bits_match_the_formula_of_the_paper():
    # Korthikanti et al., equation 1: s b h (34 + 5 a s / h) bytes per layer; fused attention keeps no scores.
    seq, batch, hidden = 2048, 1, 12288
    gpt3 = Training(
        params=175 * 10**9, layers=96, hidden=hidden, seq=seq, batch=batch, dtype="mixed", dropout=True
    )
    assert layer_activation_bytes(gpt3) == pytest.approx(seq * batch * hidden * 34, rel=1e-4)


@pytest.mark.parametrize(
    ("strategy", "gigabytes"), [("single", 120), ("ddp", 120), ("zero1", 31.4), ("fsdp", 1.9)]
)
def test_states_with_sixteen_bytes_per_parameter_match_the_zero_paper(strategy, gigabytes):
    # ZeRO, figure 1: 7.5e9 parameters on 64 GPUs, 120 GB unsharded and 1.9 GB fully sharded.
    need = footprint(replace(LLAMA_LIKE, params=75 * 10**8), strategy, 64)
    assert states_bytes(need) / 1e9 == pytest.approx(gigabytes, abs=0.05)


def states_bytes(need: Any) -> int:
    return need.parameters_bytes + need.master_copy_bytes + need.gradients_bytes + need.optimizer_bytes


# --- strategies and machines


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_the_rows_add_up(strategy):
    need = footprint(LLAMA_LIKE, strategy, 8)
    assert need.total_bytes + need.host_bytes == sum(asdict(need).values())


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_the_minimum_number_of_gpus_fits_and_one_fewer_does_not(strategy):
    training = replace(LLAMA_LIKE, checkpointing=True)
    least = smallest_ranks(training, strategy, 40 * GIB)
    assert least is not None
    assert fits(training, strategy, least, 40 * GIB)
    assert not fits(training, strategy, least - 1, 40 * GIB)


# --- the command


def rows_of(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, dict[str, Any]]:
    command.main([*args, "--json"], standalone_mode=False)
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def test_json_has_one_row_per_strategy(capsys):
    rows = rows_of(capsys, *SMALL, "--gpu-memory-gib", "16", "--gpus-per-node", "4", "--ranks", "8")
    assert list(rows) == list(STRATEGIES)
    assert (rows["single"]["ranks"], rows["ddp"]["ranks"]) == (1, 8)
    assert rows["ddp"]["parameters_bytes"] == 4_000_000
    assert rows["fsdp"]["optimizer_bytes"] == 1_000_000
    assert rows["ddp"]["all_ranks_bytes"] == 8 * rows["ddp"]["total_bytes"]
    assert (rows["ddp"]["fits"], rows["ddp"]["min_gpus"], rows["ddp"]["min_nodes"]) == (True, 1, 1)


def test_a_trillion_parameters_are_counted_in_full(capsys):
    # Not the 8.8 TB that such lessons add up: Adam's float32 states are 8 TB, the master copy 4.
    sizes = words("--params 1e12 --layers 120 --hidden 12288 --seq 2048 --batch 128 --dtype mixed")
    row = rows_of(capsys, *sizes, "--strategy", "single")["single"]
    names = ("parameters", "gradients", "master_copy", "optimizer")
    assert [row[f"{name}_bytes"] / 1e12 for name in names] == [2, 2, 4, 8]
    assert row["activations_bytes"] / 1e12 == pytest.approx(12.4, abs=0.05)


def test_the_table_shows_which_strategy_fits():
    options = "--params 7B --layers 32 --hidden 4096 --seq 4096 --batch 1 --dtype mixed --checkpointing"
    done = run_cli("estimate", *options.split(), "--gpus-per-node", "4", "--gpu-memory-gib", "40")
    assert (done.returncode, done.stderr) == (0, b"")
    table = {line[:22].strip(): line[22:].split() for line in done.stdout.decode().splitlines()}
    assert table["per rank, ~ estimate"] == list(STRATEGIES)
    assert table["fits"] == ["no", "no", "no", "yes", "yes"]
    assert table["fewest GPUs"][:2] == ["never", "never"]


def test_a_profile_provides_the_gpus_per_node_and_their_memory(capsys):
    by_hand = rows_of(capsys, *SMALL, "--gpu-memory-gib", "40", "--gpus-per-node", "4")
    assert rows_of(capsys, *SMALL, "--profile", "polaris") == by_hand
    two = rows_of(capsys, *SMALL, "--gpu-memory-gib", "40", "--gpus-per-node", "2")
    assert rows_of(capsys, *SMALL, "--profile", "polaris", "--gpus-per-node", "2") == two


def test_a_profile_without_gpus_is_reported(capsys):
    with pytest.raises(RequestError, match=r"generic_slurm does not define the memory .* --gpu-memory-gib"):
        command.main([*SMALL, "--profile", "generic_slurm"], standalone_mode=False)
    both = ["--gpu-memory-gib", "40", "--gpus-per-node", "2"]
    assert rows_of(capsys, *SMALL, "--profile", "generic_slurm", *both) == rows_of(capsys, *SMALL, *both)


def test_sizes_that_contradict_the_number_of_parameters_cause_a_warning(capsys):
    command.main([*SMALL[2:], "--params", "7B"], standalone_mode=False)
    assert "warning: --params is 7e+09, but these layers have 1.57e+06 parameters" in capsys.readouterr().err


def test_no_torch_is_needed():
    block = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; from ddp_hpc.cli import main; main()"
    )
    argv = [sys.executable, "-c", block, "estimate", *SMALL]
    done = subprocess.run(argv, env=clean_environ(), capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


NO_COUNTS = ["0", "-1", "1e400", "7.5", "nan", "many", "", "\u0667", "7\n8"]


@pytest.mark.parametrize("text", [*NO_COUNTS, pytest.param("9" * 10_000, id="ten thousand digits")])
def test_an_invalid_count_is_refused(text):
    with pytest.raises(RequestError, match=r"^--params must be a whole number from 1 to 1e18") as refused:
        command.main([*SMALL, "--params", text], standalone_mode=False)
    assert len(str(refused.value).splitlines()) == 1
