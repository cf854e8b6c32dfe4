"""Datasets in the memory of the program whose items are not pairs of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ddp_hpc.base.errors import DataError
from ddp_hpc.data.in_memory import samples_of_dataset


class Items:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return 3

    def __getitem__(self, _: int) -> Any:
        return self._make()


def _fails() -> Any:
    raise OSError("the disk is damaged")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_fails, "dataset[0] raised OSError: the disk is damaged"),
        (lambda: {"input_ids": [1], "labels": [2]}, "returned a dict with 2 values; a pair (src, tgt)"),
        (lambda: "ab", "dataset[0] returned a str; a pair"),
        (lambda: ([1], [2], [3]), "dataset[0] returned a tuple with 3 values; a pair"),
    ],
)
def test_an_item_that_is_not_a_pair_is_described(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        samples_of_dataset(Items(make))
    assert words in str(caught.value)
