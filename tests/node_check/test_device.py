"""What a rank finds out about its device."""

from __future__ import annotations

import torch

from ddp_hpc.node_check.device import memory_in_use, product_is_right

GIB = 1024**3


def test_memory_of_another_process_is_named_in_gib() -> None:
    said = memory_in_use(lambda: (40 * GIB, int(77.2 * GIB)), 1, limit_s=0.0)
    assert said == "37.2 GiB of memory in use by other processes"


def test_memory_that_is_freed_in_time_is_no_problem() -> None:
    free_bytes = iter([10 * GIB, 79 * GIB])
    assert memory_in_use(lambda: (next(free_bytes), 80 * GIB), 1) == ""


def test_each_rank_that_shares_a_device_may_have_a_context_on_it() -> None:
    def ask() -> tuple[int, int]:
        return 76 * GIB, 80 * GIB

    assert memory_in_use(ask, 4, limit_s=0.0) == ""
    assert memory_in_use(ask, 1, limit_s=0.0) == "4.0 GiB of memory in use by other processes"


def test_the_product_of_a_correct_device_is_exact() -> None:
    assert product_is_right(torch.device("cpu"), 256)


def test_one_wrong_element_of_the_product_is_noticed(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    multiply = torch.Tensor.__matmul__

    def wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = multiply(left, right)
        if product.dim() == 2:
            product[7, 9] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    assert not product_is_right(torch.device("cpu"), 256)
