"""Counts what operators compute and move, from the shapes of their inputs."""

from __future__ import annotations

import math
import re

# Which of the shapes in the inputs of operators are those of the first matrix; the next one is the second.
_FIRST_MATRIX = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_scaled_mm": 0}
# Others launch such kernels for a part of their work, or do not read their inputs and write an output of the
# same type once each.
_ELEMENTWISE = re.compile(
    "aten::(add|addcdiv|addcmul|clamp|clamp_max|clamp_min|copy|cos|div|elu|erf|exp|fill|gelu|hardsigmoid"
    "|hardswish|hardtanh|leaky_relu|lerp|log|log1p|log2|log_sigmoid|maximum|minimum|mish|mul|neg|pow"
    "|reciprocal|relu|rsqrt|rsub|sigmoid|silu|sin|softplus|sqrt|sub|tanh|threshold|zero)(_backward)?_?"
)
# Kernels that add up the parts of a product, which others computed.
_REDUCES_PARTS = re.compile("splitk_?reduce|PostGSU", re.IGNORECASE)
_IMPOSSIBLE = 2**90
_SOFTMAX = re.compile(r"aten::_(log_)?softmax(_backward_data)?")
_SIZES = {
    "bool": 1, "unsigned char": 1, "Half": 2, "BFloat16": 2, "float": 4, "int": 4, "double": 8, "long int": 8,
}  # fmt: skip


def shapes(text: str) -> list[tuple[int, ...]]:
    """Returns the shapes in a text of `shapes_of`; at least one, which is empty if the text is.

    >>> shapes("4096, 256x1024 (BFloat16)")
    [(4096,), (256, 1024)]
    """
    return [tuple(map(int, re.findall(r"\d{1,18}", shape))) for shape in text.partition(" (")[0].split(",")]


def num_flops(operator: str, inputs: str, kernel: str = "") -> int:
    """Returns the floating-point operations of a call of an operator for matrix products, with the shapes of
    its inputs as in `shapes_of`; 0 if unknown, or if the kernel only adds up parts. As in
    torch.utils.flop_counter, only the product counts.

    >>> num_flops("aten::addmm", "4096, 256x1024, 1024x4096 (BFloat16)") == 2 * 256 * 1024 * 4096
    True
    """
    first, sizes = _FIRST_MATRIX.get(operator), shapes(inputs)
    if first is None or len(sizes) < first + 2 or _REDUCES_PARTS.search(kernel):
        return 0
    left, right = sizes[first : first + 2]
    fits = len(left) == len(right) > 1 and left[-1] == right[-2]
    return _possible(2 * math.prod(left) * right[-1]) if fits else 0


def num_bytes(operator: str, kind: str, inputs: str) -> int:
    """Returns the bytes that a call of an elementwise operator, a copy or a softmax moves at least, which are
    its inputs and its output, once each; 0 if unknown.

    >>> num_bytes("aten::mul", "elementwise", "16x9x64, 1x1x64 (BFloat16)") == 2 * (2 * 9216 + 64)
    True
    """
    text, _, types = inputs.partition(" (")
    known, sizes = [_SIZES.get(name, 0) for name in types.rstrip(")").split(", ")], shapes(text)
    is_simple = _ELEMENTWISE.fullmatch(operator) and kind in ("elementwise", "copies")
    # Of several types, one can be that of a number, except for copies.
    is_aligned = len(known) == 1 or (operator == "aten::copy_" and len(known) == len(sizes))
    if not (is_simple or _SOFTMAX.fullmatch(operator)) or not all(known):
        return 0
    if not (is_aligned or len(sizes) == 1):
        return 0
    of_each = known if len(known) == len(sizes) else [min(known)] * len(sizes)
    of = [math.prod(size) * each for size, each in zip(sizes, of_each, strict=True)]
    if operator in ("aten::fill_", "aten::zero_"):
        return _possible(of[0])
    written = 0 if operator == "aten::copy_" else of[0] if operator.endswith("_") else max(of)
    return _possible(sum(of) + written)


def _possible(number: int) -> int:
    """Returns the number; 0 if damaged shapes make it so large that it cannot be divided by a time."""
    return number if number < _IMPOSSIBLE else 0
