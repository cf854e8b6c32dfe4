"""The cross entropy of a linear layer, without a float32 tensor of all scores (logits).

The scores of a batch are often the largest tensors of a step: for 32,768 tokens and a vocabulary of 50,257,
they take 6.6 GB in float32, and autograd keeps a second tensor of that size. Here, the scores of a block of
tokens are computed at a time, together with their gradients, so that no scores are kept for the backward pass
(as in Liger Kernel, arXiv 2410.10989, and `torch.nn.functional.linear_cross_entropy` of torch 2.13). Compiled
code computes all scores at once, in the type of the product, and has float32 values only in registers.

Shapes: N tokens, E width, V vocabulary, P vocabulary with padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ddp_hpc.training.tasks.task import IGNORED

# Products on tensor cores are fast if sizes are multiples of 64 values of 2 bytes (A100 and newer):
# https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/
_MULTIPLE = 64
# The most scores that are computed at once; 1 GiB in float32. Fewer scores would mean more passes over the
# gradient of the weight.
_MOST_SCORES = 2**28


def padded_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the scores (..., V) of a linear layer, computed with a padded weight."""
    scores = functional.linear(x, _padded(weight, weight.dtype))
    return scores[..., : len(weight)]


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross entropy of the scores of `x` (N, E) with a weight (V, E), and labels (N,).

    Padding of the vocabulary does not change the result. Labels of -100 are ignored, as by torch.
    """
    device = x.device.type
    is_autocast = device != "meta" and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_autocast else x.dtype
    if torch.compiler.is_compiling():
        # The compiler computes float32 values in registers, and keeps the scores in `dtype`.
        scores = functional.linear(x.to(dtype), _padded(weight, dtype))[:, : len(weight)]
        return functional.cross_entropy(scores.to(_precise(dtype)), labels, ignore_index=IGNORED)
    loss: Tensor = _LinearCrossEntropy.apply(x.to(dtype), weight, labels)  # type: ignore[no-untyped-call]
    return loss


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight (P, E) in the type of the product, with rows of zeros appended.

    The parameter itself is not padded: mixed precision copies it anyway, and the copy can have more rows.
    """
    missing = -len(weight) % _MULTIPLE
    return functional.pad(weight.to(dtype), (0, 0, 0, missing)) if missing else weight.to(dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the loss of a block of tokens at a time, together with the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        wide, precise = _padded(weight, x.dtype), _precise(x.dtype)
        num_rows = max(1, _MOST_SCORES // len(wide))
        counts = labels != IGNORED
        loss = torch.zeros((), dtype=precise, device=x.device)
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight: Tensor | None = None
        for begin in range(0, len(x), num_rows):
            rows = slice(begin, begin + num_rows)
            some, counted = x[rows], counts[rows, None]
            wanted = torch.where(counted, labels[rows, None], 0)
            scores = some @ wide.T  # (rows, P)
            scores[:, len(weight) :] = -torch.inf
            logs = torch.log_softmax(scores, dim=1, dtype=precise)
            of_labels = logs[:, : len(weight)].gather(1, wanted)  # on a CPU, an error for other labels
            loss -= (of_labels * counted).sum()
            if not (needs_x or needs_weight):
                continue
            # The mean is taken in the backward pass, because float16 could not represent such small values.
            grads = torch.exp(logs, out=logs).to(x.dtype)
            grads.scatter_(1, wanted, of_labels.expm1().to(x.dtype))
            if grad_x is not None:
                grad_x[rows] = (grads @ wide) * counted
            if needs_weight:
                grad = grads.T @ (some * counted)
                if grad_weight is not None:
                    grad_weight += grad
                else:  # a single product needs no sum in float32
                    grad_weight = grad if num_rows >= len(x) else grad.to(precise)
        num = counts.sum()
        ctx.dtype, ctx.num_labels = weight.dtype, len(weight)
        ctx.save_for_backward(grad_x, grad_weight, num)
        return loss / num

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_x, grad_weight, num = ctx.saved_tensors
        factor = grad / num
        if grad_weight is not None:
            grad_weight = grad_weight[: ctx.num_labels].to(ctx.dtype) * factor
        return None if grad_x is None else grad_x * factor, grad_weight, None
