"""Estimates how much memory each rank needs to train a Transformer.

The sizes of parameters, gradients and optimizer states are exact: the number of elements times the bytes per
element. All other sizes are estimates. The states are those of ZeRO (arXiv:1910.02054, section 3). The
activations follow Korthikanti et al. (arXiv:2205.05198, section 4), for layers of self-attention and an MLP
with one hidden layer and fused attention, without tensor parallelism.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.options import check_values, option

MAX_RANKS = 2**20
GIB = 2**30

_POWERS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_LARGEST = 10**18
_MOST_GIB = 10**9


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The bytes per element of the tensors of a training; 0 if a tensor does not exist."""

    parameters: int
    gradients: int
    states: int  # optimizer states: one per parameter for momentum, two for Adam
    compute: int  # inputs and outputs of matrix products, which are kept for the backward pass
    norms: int  # the residual stream, which LayerNorm keeps for the backward pass
    loss: int  # log-softmax
    master: int = 0  # a float32 copy of the parameters, kept by the optimizer
    cast: int = 0  # a copy of the weights that autocast makes in each forward pass


PRECISIONS = {
    "fp32": Precision(parameters=4, gradients=4, states=4, compute=4, norms=4, loss=4),
    # torch's optimizers keep their states in the dtype of the parameters.
    "bf16": Precision(parameters=2, gradients=2, states=2, compute=2, norms=2, loss=2),
    # torch.autocast: the parameters are the float32 copy, and LayerNorm's input stays float32.
    "amp": Precision(parameters=4, gradients=4, states=4, compute=2, norms=4, loss=4, cast=2),
    # ZeRO's 16 bytes per parameter with Adam: 2 + 2 + 4 + 8.
    "mixed": Precision(parameters=2, gradients=2, states=4, compute=2, norms=2, loss=4, master=4),
}

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the ranks store the model states. States that are not sharded are stored in full on every rank."""

    shards_states: bool = False
    shards_all: bool = False
    offloads: bool = False
    one_rank: bool = False


STRATEGIES = {
    "single": Strategy(one_rank=True),
    "ddp": Strategy(),
    "zero1": Strategy(shards_states=True),
    "fsdp": Strategy(shards_all=True, shards_states=True),
    "fsdp-offload": Strategy(shards_all=True, shards_states=True, offloads=True),
}


def read_count(flag: str, text: str) -> int:
    """Converts a whole number of at least 1, also written as 7e9 or 7B.

    Raises:
        RequestError: the text is not such a number.
    """
    power = _POWERS.get(text[-1:].lower())
    try:
        # A float would be infinite for 1e400.
        number = Decimal(text if power is None else text[:-1]) * (power or 1)
        if text.isascii() and 1 <= number <= _LARGEST and number == int(number):
            return int(number)
    except InvalidOperation:
        pass
    raise RequestError(
        f"{flag} must be a whole number from 1 to 1e18, such as 7000000000, 7e9 or 7B (got {text[:40]!r})"
    )


def _count(help_text: str, default: int | None = 0, shown_default: str = "") -> Any:
    return option(default, help_text, read=read_count, metavar="N", at_least=1, shown_default=shown_default)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model and its training settings.

    Raises:
        OptionError: a size is below 1, or a name is unknown.
    """

    params: int = _count("Number of model parameters, for example 7000000000, 7e9 or 7B.")
    layers: int = _count("Number of Transformer layers.")
    hidden: int = _count("Hidden size of the model.")
    seq: int = _count("Sequence length.")
    batch: int = _count("Number of samples per rank and micro-batch.")
    ffn: int | None = _count("Width of the MLP in each layer.", None, "4 x hidden")
    vocab: int | None = _count("Vocabulary size. If it is given, the estimate includes the logits.", None)
    dtype: Literal["fp32", "bf16", "amp", "mixed"] = option(
        "fp32",
        "Training precision. amp: autocast with float32 parameters; mixed: bfloat16 with a float32 master "
        "copy.",
    )
    optimizer: Literal["sgd", "momentum", "adam", "adamw"] = option("adam", "Optimizer used for training.")
    dropout: bool = option(False, "Include the memory of the dropout masks.")
    checkpointing: bool = option(
        False, "Activation checkpointing: keep only the layers' inputs and recompute the rest."
    )
    fused: bool = option(
        False,
        "Assume Adam with fused=True, which needs no temporary buffers; ddp_hpc.train uses it on GPUs.",
    )
    overhead_gib: float = option(
        2.0,
        "Memory per GPU in GiB that is reserved for the CUDA context, NCCL and fragmentation.",
        metavar="GIB",
        at_least=0,
        below=_MOST_GIB,
    )

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def precision(self) -> Precision:
        """The bytes per element for the dtype of this training."""
        return PRECISIONS[self.dtype]

    @property
    def params_of_layers(self) -> int:
        """The number of parameters in all layers: four matrices of the attention and two of the MLP each."""
        return self.layers * self.hidden * (4 * self.hidden + 2 * (self.ffn or 4 * self.hidden))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs for which the memory is estimated. None: from the profile, or unknown.

    Raises:
        OptionError: a number is out of range, or the strategy is unknown.
    """

    strategy: Literal["single", "ddp", "zero1", "fsdp", "fsdp-offload"] | None = option(
        None, "Show only this strategy."
    )
    ranks: int | None = _count("Number of ranks, one per GPU.", None, "the number of GPUs per node")
    profile: str = option(
        "",
        "Site profile that defines the number of GPUs per node and the memory per GPU; see `ddp-hpc profiles "
        "list`.",
        metavar="NAME",
    )
    gpus_per_node: int | None = _count("Number of GPUs per node.", None, "from the profile, or 1")
    gpu_memory_gib: float | None = option(
        None,
        "Memory per GPU in GiB. If it is known, the output shows which strategies fit.",
        metavar="GIB",
        above=0,
        below=_MOST_GIB,
        shown_default="from the profile",
    )

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory of one rank in bytes. `host_bytes` is host memory, all others are GPU memory."""

    parameters_bytes: int
    master_copy_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    cast_weights_bytes: int
    gathered_bytes: int
    activations_bytes: int
    backward_bytes: int
    logits_bytes: int
    optimizer_step_bytes: int
    overhead_bytes: int
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        """The total GPU memory in bytes."""
        everywhere: int = sum(asdict(self).values())
        return everywhere - self.host_bytes


def layer_activation_bytes(training: Training) -> int:
    """Returns the bytes that one layer keeps from its forward pass for its backward pass.

    These are tensors of seq x batch x hidden elements: the inputs and outputs of two norms, the query, key
    and value, and the output of the attention; and the hidden layer of the MLP before and after GELU. With
    dropout and bfloat16, the sum is Korthikanti's 34 sbh bytes plus the statistics of the norms. Fused
    attention keeps no scores.
    """
    precision = training.precision
    tokens = training.seq * training.batch
    wide = 6 * training.hidden + 2 * (training.ffn or 4 * training.hidden)
    kept = tokens * (2 * training.hidden * precision.norms + wide * precision.compute)
    kept += tokens * 4 * 4  # mean and reciprocal standard deviation of two norms, in float32
    if training.dropout:
        kept += 2 * tokens * training.hidden  # masks of one byte
    return kept


def activation_bytes(training: Training) -> int:
    """Returns the bytes of the activations kept for the backward pass.

    These are the activations of all layers or, with checkpointing, the inputs of all layers and the
    activations of one layer.
    """
    layer = layer_activation_bytes(training)
    if not training.checkpointing:
        return training.layers * layer
    layer_input = training.seq * training.batch * training.hidden * training.precision.norms
    return (training.layers - 1) * layer_input + layer


def logits_bytes(training: Training) -> int:
    """Returns the bytes of the logits, their log-softmax, and the gradients of both."""
    tokens = training.seq * training.batch
    return tokens * (training.vocab or 0) * (training.precision.compute + 3 * training.precision.loss)


def backward_bytes(training: Training) -> int:
    """Returns the bytes that the backward pass of one layer adds to the kept activations.

    These are the gradients of the residual stream and of the hidden layer of the MLP. Measured peaks show
    that they exist at the same time.
    """
    tokens, precision = training.seq * training.batch, training.precision
    width = training.ffn or 4 * training.hidden
    return tokens * (2 * training.hidden * precision.norms + width * precision.compute)


def footprint(training: Training, strategy: str, ranks: int) -> Footprint:
    """Returns the memory of one of `ranks` ranks.

    The sum is an upper bound: in the backward pass, gradients are allocated while activations are freed, but
    both are counted in full.
    """
    how, precision = STRATEGIES[strategy], training.precision
    shard = -(-training.params // ranks)
    held = shard if how.shards_all else training.params
    stepped = shard if how.shards_states else training.params
    states = {
        "parameters_bytes": held * precision.parameters,
        "master_copy_bytes": stepped * precision.master,
        "gradients_bytes": held * precision.gradients,
        "optimizer_bytes": stepped * precision.states * OPTIMIZERS[training.optimizer],
    }
    passing = {
        "cast_weights_bytes": 0 if how.shards_all else training.params * precision.cast,
        "gathered_bytes": _gathered_bytes(training) if how.shards_all else 0,
        "activations_bytes": activation_bytes(training),
        "backward_bytes": backward_bytes(training),
        "logits_bytes": logits_bytes(training),
    }
    # torch's foreach Adam allocates a temporary tensor per parameter, after the activations have been freed.
    has_temporaries = OPTIMIZERS[training.optimizer] == 2 and not training.fused and not how.offloads
    step = max(0, stepped * precision.states - sum(passing.values())) if has_temporaries else 0
    return Footprint(
        **(dict.fromkeys(states, 0) if how.offloads else states),
        **passing,
        optimizer_step_bytes=step,
        overhead_bytes=int(training.overhead_gib * GIB),
        host_bytes=sum(states.values()) if how.offloads else 0,
    )


def _gathered_bytes(training: Training) -> int:
    """Returns the bytes of unsharded parameters in FSDP, with one FSDP unit per layer.

    These are the parameters of two layers (one in use, one being prefetched), their gradients in the dtype of
    the reduction, and the embedding, which stays unsharded between the forward and the backward pass.
    """
    precision = training.precision
    embedding = min(training.params, (training.vocab or 0) * training.hidden)
    layer = -(-(training.params - embedding) // training.layers)
    whole = min(training.params, embedding + 2 * layer)
    return whole * (precision.compute + precision.gradients)


def fits(training: Training, strategy: str, ranks: int, gpu_memory_bytes: int) -> bool:
    """Returns whether each rank fits in the memory of its GPU."""
    return footprint(training, strategy, ranks).total_bytes <= gpu_memory_bytes


def smallest_ranks(training: Training, strategy: str, gpu_memory_bytes: int) -> int | None:
    """Returns the smallest number of GPUs on which the training fits; None if it does not fit on 2**20."""
    candidates = range(1, 2 if STRATEGIES[strategy].one_rank else MAX_RANKS + 1)
    first = bisect_left(candidates, True, key=lambda ranks: fits(training, strategy, ranks, gpu_memory_bytes))
    return candidates[first] if first < len(candidates) else None
