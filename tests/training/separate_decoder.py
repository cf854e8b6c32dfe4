"""The decoder of version 0.2: separate queries, keys and values, and the loss computed from all scores.

The tests train it as `--model tests.training.separate_decoder:decoder`, to compare losses, and to make
snapshots as that version did.

Shapes: B batch, T length, E width, H heads, D width of a head, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_hpc.errors import RequestError
from ddp_hpc.training.tasks.task import SampleSpec, Task, label_loss

# Standard deviation of the initial weights, as in GPT-2. For layers that add to the residual stream, it is
# divided by the square root of the number of such layers.
_INIT_STD = 0.02


def decoder(
    spec: SampleSpec,
    dropout: float,
    layers: int = 4,
    heads: int = 4,
    width: int = 128,
    tied: bool = True,
) -> Task:
    """Returns a task with a decoder that predicts each next token; the loss is the cross entropy in nats.

    With `tied`, the head uses the weights of the embedding. Pipelines need `tied=False`, because the two are
    on different devices.

    Raises:
        RequestError: invalid sizes, or samples that are not tokens.
    """
    for name, value in (("layers", layers), ("heads", heads), ("width", width)):
        if type(value) is not int or value < 1:
            raise RequestError(f"--model-option {name} must be a positive integer (got {value})")
    if type(tied) is not bool:
        raise RequestError(f"--model-option tied must be True or False (got {tied})")
    if width % heads:
        raise RequestError(
            f"--model-option width must be a multiple of heads={heads} (got {width}); "
            f"the nearest is {max(1, round(width / heads)) * heads}"
        )
    if len(spec.src_shape) != 1 or spec.src_shape != spec.tgt_shape or spec.num_classes is None:
        raise RequestError(
            "--model decoder requires samples of tokens: src and tgt of the same length, and the file's "
            f"num_classes. The data has src {spec.src_shape}, tgt {spec.tgt_shape} and "
            f"{spec.num_classes or 'no'} classes; `python -m data_gen text` creates such files"
        )
    return Task(
        model=Decoder(spec.num_classes, spec.src_shape[0], layers, heads, width, dropout, tied),
        loss=_loss,
        src_indices=True,
        tgt_indices=True,
        tensor_parallel=_tensor_parallel,
        stages=_stages,
    )


class Decoder(nn.Module):
    """Computes scores (B, T, V) of each next token from tokens (B, T) int64, with T up to `length`."""

    def __init__(
        self, num_tokens: int, length: int, layers: int, heads: int, width: int, dropout: float, tied: bool
    ) -> None:
        super().__init__()
        self.length = length
        self.embedding = Embedding(num_tokens, length, width, dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.head = Head(num_tokens, width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds = name.endswith((".out.weight", ".down.weight"))
                nn.init.normal_(parameter, std=_INIT_STD / (2 * layers) ** 0.5 if adds else _INIT_STD)
        if tied:
            self.head.scores.weight = self.embedding.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens (B, T) to scores (B, T, V), with the layers in the same order as in a pipeline."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores


class Embedding(nn.Module):
    """Embeds tokens (B, T) int64 and their positions as vectors (B, T, E)."""

    def __init__(self, num_tokens: int, length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens (B, T) to vectors (B, T, E)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.dropout(self.tokens(tokens) + self.positions(positions))
        return x


class Block(nn.Module):
    """Attention and two dense layers with residual connections: (B, T, E) to (B, T, E)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.dense_norm = nn.LayerNorm(width)
        self.dense = Dense(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, E) to (B, T, E)."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y: Tensor = x + self.dropout(self.dense(self.dense_norm(x)))
        return y


class Attention(nn.Module):
    """Causal self-attention with torch's fused kernels."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.dropout = dropout
        # Three layers instead of one, so that tensor parallelism splits each by whole heads.
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, E) to (B, T, E)."""
        q, k, v = (self._by_head(project(x)) for project in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        # (B, H, T, D)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out

    def _by_head(self, x: Tensor) -> Tensor:
        """Returns the values as (B, H, T, D), where H is the number of heads on this rank."""
        return x.view(*x.shape[:-1], -1, self.head_width).transpose(1, 2)


class Dense(nn.Module):
    """Two dense layers; the hidden layer is four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, E) to (B, T, E)."""
        y: Tensor = self.down(functional.gelu(self.up(x)))
        return y


class Head(nn.Module):
    """The output layer, which maps vectors (B, T, E) to scores (B, T, V)."""

    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, num_tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, E) to scores (B, T, V)."""
        scores: Tensor = self.scores(self.norm(x))
        return scores


def _loss(scores: Tensor, tgt: Tensor) -> Tensor:
    return label_loss(scores.flatten(0, 1), tgt.flatten())


def _tensor_parallel(model: nn.Module) -> dict[str, Any]:
    """Returns a plan that divides heads and dense layers among ranks, with two all-reduces per block."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            plan |= {f"{name}.{part}": ColwiseParallel() for part in ("query", "key", "value")}
            plan[f"{name}.out"] = RowwiseParallel()
        elif isinstance(module, Dense):
            plan[f"{name}.up"], plan[f"{name}.down"] = ColwiseParallel(), RowwiseParallel()
    return plan


def _stages(model: nn.Module, num_stages: int) -> Sequence[nn.Module]:
    assert isinstance(model, Decoder)
    if num_stages > 1 and model.head.scores.weight is model.embedding.tokens.weight:
        raise RequestError(
            f"the decoder's head uses the embedding's weights, which {num_stages} stages cannot share; "
            "use --model-option tied=False"
        )
    if num_stages > len(model.blocks):
        raise RequestError(
            f"the decoder has {len(model.blocks)} layers, but {num_stages} stages need at least one each; "
            f"use --model-option layers={num_stages} or more, or fewer stages"
        )
    cuts = [len(model.blocks) * stage // num_stages for stage in range(num_stages + 1)]
    stages = [list(model.blocks[begin:end]) for begin, end in pairwise(cuts)]
    stages[0].insert(0, model.embedding)
    stages[-1].append(model.head)
    return [nn.Sequential(*stage) for stage in stages]
