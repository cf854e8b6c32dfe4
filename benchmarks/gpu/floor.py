"""The rates that bound every step, and the shortest time that they allow for a step of the lesson's model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

Values = dict[str, Any]
_NUM_PRODUCTS = 200


def median_s(call: Callable[[], object], device: Any, times: int = 10) -> float:
    """Returns the median time of a call, in seconds, after three calls that are not timed."""
    import torch

    found = []
    for number in range(times + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 3:
            found.append(time.perf_counter() - start_s)
    return statistics.median(found)


def rates(device_name: str, report: Callable[..., None]) -> None:
    """Measures matrix products, copies in memory and over PCIe, launches, and the shortest kernels."""
    import torch

    device, is_gpu = torch.device(device_name), device_name == "cuda"
    size = 8192 if is_gpu else 512
    for name, dtype, precision in (
        ("bf16", torch.bfloat16, "highest"),
        ("tf32", torch.float32, "high"),
        ("float32", torch.float32, "highest"),
    ):
        torch.set_float32_matmul_precision(precision)
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        seconds = median_s(lambda a=left, b=right: a @ b, device)
        report(**{f"{name}_tflops_per_s": 2 * size**3 / seconds / 1e12})
    num_bytes = 2**30 if is_gpu else 2**25
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    report(copy_gb_per_s=2 * num_bytes / median_s(lambda: target.copy_(source), device) / 1e9)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
    report(to_host_gb_per_s=num_bytes / median_s(lambda: host.copy_(source), device) / 1e9)
    report(from_host_gb_per_s=num_bytes / median_s(lambda: source.copy_(host), device) / 1e9)
    left, right = (torch.randn(32, 512, device=device), torch.randn(512, 512, device=device))
    into = torch.empty(32, 512, device=device)

    def products() -> None:
        for _ in range(_NUM_PRODUCTS):
            torch.mm(left, right, out=into)

    report(launched_product_us=median_s(products, device) / _NUM_PRODUCTS * 1e6)
    if is_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            products()
        report(product_us=median_s(graph.replay, device) / _NUM_PRODUCTS * 1e6)
    else:
        report(product_us=median_s(products, device) / _NUM_PRODUCTS * 1e6)


def floor_s(embedding: int, found: Values, *, is_half: bool) -> float | None:
    """Returns the shortest time that the measured rates allow for a step, or None if one is missing.

    A matrix product takes as long as its multiplications, the transfer of its operands or the shortest
    kernel, whichever is longest. After the backward pass, Adam reads four and writes three float32 values per
    parameter. Attention counts with its multiplications only, because it can run in one kernel.
    """
    names = ("bf16_tflops_per_s" if is_half else "float32_tflops_per_s", "copy_gb_per_s", "product_us")
    if any(name not in found for name in names):
        return None
    flops_per_s, bytes_per_s, product_s = (
        found[n] * f for n, f in zip(names, (1e12, 1e9, 1e-6), strict=True)
    )
    products, other_flops, num_parameters = count_products(embedding)
    itemsize = 2 if is_half else 4
    return (
        sum(max(product_s, f / flops_per_s, itemsize * numel / bytes_per_s) for f, numel in products)
        + other_flops / flops_per_s
        + 7 * 4 * num_parameters / bytes_per_s
    )


def count_products(embedding: int) -> tuple[list[tuple[int, int]], int, int]:
    """Counts the work of a step of the lesson's model with 32 samples, without computing it.

    Returns the multiplications and additions of each matrix product and the elements that it reads and
    writes, those of attention, and the number of parameters.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    products: list[tuple[int, int]] = []
    others: list[int] = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            result = func(*args, **(kwargs or {}))
            packet = func._overloadpacket
            if packet in (torch.ops.aten.mm, torch.ops.aten.addmm):
                flops = flop_registry[packet](*args, out_val=result)
                products.append((flops, result.numel() + sum(one.numel() for one in args[-2:])))
            elif packet in flop_registry:
                others.append(flop_registry[packet](*args, **(kwargs or {}), out_val=result))
            return result

    with torch.device("meta"):
        model = torch.nn.Transformer(embedding, batch_first=True, dropout=0.0)
        src, tgt = torch.empty(32, 1, embedding), torch.empty(32, 20, embedding)
    with Counter():
        model(src, tgt).sum().backward()
    return products, sum(others), sum(parameter.numel() for parameter in model.parameters())
