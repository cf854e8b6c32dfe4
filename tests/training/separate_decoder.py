"""A decoder with separate queries, keys and values, whose loss is computed from all scores.

The tests compare it with the decoder of the package, which computes both in fewer steps. They train it as
`--model tests.training.separate_decoder:decoder`, in one process.

Shapes: B batch, T length, E width, H heads, D width of a head, V tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

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

    With `tied`, the head uses the weights of the embedding.
    """
    assert spec.num_classes is not None
    return Task(
        model=Decoder(spec.num_classes, spec.src_shape[0], layers, heads, width, dropout, tied),
        loss=_loss,
        src_indices=True,
        tgt_indices=True,
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
