"""A small GPT-2 that predicts bytes or other tokens, for files made by `python -m data_gen text`.

It follows https://github.com/karpathy/nanoGPT and Radford et al., 2019 ("Language Models are Unsupervised
Multitask Learners"): learned positions, pre-norm blocks, GELU, and a head tied to the embedding.

Shapes: B batch, T length, E width, H heads (on this rank), D width of a head, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_hpc.base.errors import RequestError
from ddp_hpc.training.tasks.linear_cross_entropy import linear_cross_entropy, padded_linear
from ddp_hpc.training.tasks.task import SampleSpec, Task, explaining_labels, label_loss

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
        fused_loss=partial(_fused_loss, spec.num_classes),
        src_indices=True,
        tgt_indices=True,
        tensor_parallel=_tensor_parallel,
        stages=_stages,
    )


class Decoder(nn.Module):
    """Computes scores (B, T, V) of each next token from tokens (B, T) int64, with T up to `length`.

    With labels (B, T) int64, it computes their mean cross entropy instead.
    """

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

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Maps tokens (B, T) to scores (B, T, V), with the layers in the same order as in a pipeline."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x, labels)
        return result


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
    """Causal self-attention with torch's fused kernels: flash attention, or cuDNN, which torch prefers on an
    H100 if it is newer than 9.15.0 (`check_prefer_cudnn_attention` in torch's sdp_utils.cpp).

    One matrix product computes queries, keys and values. The rows of its weight are ordered by head,
    (H, 3, D), so that tensor parallelism splits it by whole heads, as in Megatron-LM (arXiv 1909.08053).
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_width = heads, width // heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, E) to (B, T, E)."""
        by_head = self.qkv(x).unflatten(-1, (-1, 3, self.head_width))  # (B, T, H, 3, D)
        q, k, v = by_head.transpose(1, 2).unbind(3)  # views (B, H, T, D)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


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

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Maps (B, T, E) to scores (B, T, V), or with labels (B, T) to their mean cross entropy."""
        x, weight = self.norm(x), self.scores.weight
        if labels is None:
            return padded_linear(x, weight)
        return linear_cross_entropy(x.flatten(0, 1), weight, labels.flatten())


def _loss(scores: Tensor, tgt: Tensor) -> Tensor:
    return label_loss(scores.flatten(0, 1), tgt.flatten())


def _fused_loss(num_tokens: int, model: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
    return explaining_labels(lambda: model(src, tgt), tgt, num_tokens)


def _tensor_parallel(model: nn.Module) -> dict[str, Any]:
    """Returns a plan that divides heads and dense layers among ranks, with two all-reduces per block."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            plan[f"{name}.qkv"], plan[f"{name}.out"] = ColwiseParallel(), RowwiseParallel()
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
