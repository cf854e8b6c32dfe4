"""Data of all kinds that `world.loader` accepts: Datasets, DataLoaders, and pairs of arrays."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler
from torch.utils.data._utils import signal_handling

import ddp_hpc
from ddp_hpc.data.sample_order import EpochOrder
from ddp_hpc.library.sample_sources import DatasetSource, WorkerOptions
from tests.library.test_one_process import _at_home, _ends_with, no_launcher

__all__ = ["_at_home", "no_launcher"]
pytestmark = pytest.mark.usefixtures("no_launcher")


class Texts(Dataset[dict[str, Any]]):
    """Samples of different lengths, as a tokenizer returns them."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.full((index + 1,), index), "labels": index, "name": f"text {index}"}


def pad(samples: list[dict[str, Any]]) -> dict[str, Any]:
    ids = torch.nn.utils.rnn.pad_sequence([one["input_ids"] for one in samples], batch_first=True)
    return {"input_ids": ids, "labels": torch.tensor([one["labels"] for one in samples])}


class Squares(Dataset[tuple[torch.Tensor, float, np.ndarray]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float, np.ndarray]:
        return torch.tensor([float(index)]), index**2.0, np.array([index, index])


class Noisy(Dataset[torch.Tensor]):
    """Transforms samples randomly with all three generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()])


ORDER = EpochOrder(10, 0, 0).take(0, 10).tolist()


def _batches(data: Any, **options: Any) -> list[ddp_hpc.Batch]:
    with ddp_hpc.distributed() as world:
        return list(world.loader(data, **options))


def test_the_samples_of_a_dataset_can_be_tuples_of_any_length() -> None:
    batches = _batches(Squares(), batch_size=4)
    assert [len(batch.data[0]) for batch in batches] == [4, 4, 2]
    number, square, both = (torch.cat(values) for values in zip(*(b.data for b in batches), strict=True))
    assert number.flatten().tolist() == ORDER
    assert square.tolist() == [index**2.0 for index in ORDER]
    assert both.tolist() == [[index, index] for index in ORDER]


def test_the_pairs_of_a_dataset_are_src_and_tgt() -> None:
    pairs = [({"x": torch.tensor([float(i)])}, i) for i in range(10)]
    for batch in _batches(pairs, batch_size=5):
        assert batch.src["x"].flatten().tolist() == batch.tgt.tolist()
        assert batch.data == (batch.src, batch.tgt)


def test_a_tensor_dataset_can_have_any_number_of_tensors() -> None:
    numbers = torch.arange(10.0)
    batches = _batches(TensorDataset(numbers, 2 * numbers, numbers.to(torch.bfloat16)), batch_size=4)
    first, double, rounded = (torch.cat(values) for values in zip(*(b.data for b in batches), strict=True))
    assert first.tolist() == ORDER
    assert torch.equal(double, 2 * first)
    assert rounded.dtype == torch.bfloat16


def test_a_dataset_that_reads_many_samples_at_once_is_read_once_per_batch() -> None:
    calls = []

    class Table:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            raise AssertionError("__getitems__ is faster")

        def __getitems__(self, indices: list[int]) -> list[int]:
            calls.append(indices)
            return indices

    assert torch.cat([b.data for b in _batches(Table(), batch_size=4)]).tolist() == ORDER
    assert calls == [ORDER[:4], ORDER[4:8], ORDER[8:]]


def test_the_options_of_a_data_loader_are_used() -> None:
    loader = DataLoader(Texts(), batch_size=4, shuffle=True, collate_fn=pad, drop_last=True)
    batches = _batches(loader, epochs=2)
    assert [(len(b.data["labels"]), b.step, b.epoch, b.ends_epoch) for b in batches] == [
        (4, 1, 1, False), (4, 2, 1, True), (4, 3, 2, False), (4, 4, 2, True),
    ]  # fmt: skip
    assert torch.cat([b.data["labels"] for b in batches[:2]]).tolist() == ORDER[:8]
    unshuffled = _batches(DataLoader(Texts(), batch_size=10, collate_fn=pad))
    assert unshuffled[0].data["labels"].tolist() == list(range(10))


def _weighted() -> DataLoader[Any]:
    sampler = WeightedRandomSampler([1.0] * 5 + [0.0] * 5, num_samples=12)
    return DataLoader(Squares(), batch_size=4, sampler=sampler)


def test_another_sampler_determines_the_order_and_a_resumed_loader_has_the_same_one() -> None:
    with ddp_hpc.distributed() as world:
        whole = [b.data[0].flatten().tolist() for b in world.loader(_weighted(), epochs=2)]
        torch.rand(3)  # the order does not depend on the state of the generator
        rest = [b.data[0].flatten().tolist() for b in world.loader(_weighted(), epochs=2, start_step=2)]
    assert len(whole) == 6
    assert rest == whole[2:]
    assert whole[:3] != whole[3:], "each epoch has another order"
    assert {number for batch in whole for number in batch} <= set(range(5))


def test_random_transformations_in_workers_depend_only_on_the_step() -> None:
    with ddp_hpc.distributed() as world:
        options = {"batch_size": 4, "epochs": 2}
        [whole, rest] = (
            [b.data for b in world.loader(Noisy(), workers=num, start_step=at, **options)]
            for num, at in ((2, 0), (1, 2))
        )
    assert len(whole) == 6
    assert all(torch.equal(*pair) for pair in zip(whole[2:], rest, strict=True))
    assert len({value for batch in whole for value in batch[:, 1].tolist()}) == 24, "no number is repeated"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_was_left_can_continue(workers: int) -> None:
    with ddp_hpc.distributed() as world:
        loader = world.loader(Squares(), batch_size=4, epochs=2, workers=workers)
        first = next(batch.step for batch in loader)
        assert [first, *(batch.step for batch in loader)] == [1, 2, 3, 4, 5, 6]


def _exits(_: int) -> None:
    os._exit(3)


def test_a_worker_that_exits_before_torch_knows_it_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's handler of SIGCHLD misses it, and torch itself looks for it only after the `timeout`."""
    register = signal_handling._set_worker_pids

    def register_late(*args: Any) -> None:
        for worker in multiprocessing.active_children():
            worker.join()
        register(*args)

    monkeypatch.setattr(signal_handling, "_set_worker_pids", register_late)
    handler = signal.getsignal(signal.SIGCHLD)
    begin_s = time.monotonic()
    with _ends_with(1, timeout_s=100) as world:
        list(world.loader(DataLoader(Squares(), num_workers=1, worker_init_fn=_exits)))
    assert time.monotonic() - begin_s < 90
    assert signal.getsignal(signal.SIGCHLD) is handler
    assert "reading the dataset with workers 1 failed: DataLoader worker" in capsys.readouterr().err


class Unreadable(Squares):
    def __getitem__(self, index: int) -> Any:
        raise TimeoutError("DataLoader timed out")


def test_an_exception_in_a_worker_has_its_type_and_traceback_and_ends_the_workers() -> None:
    words = r"^Caught TimeoutError in DataLoader worker process 0.\n"
    with pytest.raises(TimeoutError, match=words) as caught:
        list(DatasetSource(Unreadable().__getitem__, 10, 60.0, WorkerOptions(1)).batches(
            iter([(0, np.arange(2))]), torch.device("cpu")
        ))  # fmt: skip
    assert caught.tb is not None  # while the traceback exists, it does not keep the workers alive
    assert not multiprocessing.active_children()


X = torch.zeros(3, 1)


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (X, {}, "does not accept Tensor; pass a file path, a Dataset with __len__"),
        ([], {}, "the dataset has no samples"),
        ((X, X, X), {}, "got a tuple of 3 values; pass a tuple (inputs, targets) of two arrays, a TensorD"),
        ({"x": X, "y": X}, {}, "got a dict of 2 values; pass a tuple (inputs, targets)"),
        ([X, X], {}, "got a list of 2 values; pass a tuple (inputs, targets)"),
        ((X, X), {"workers": 2}, "workers is 2, but worker processes cannot read data in the memory"),
        ((X, X), {"collate_fn": pad}, "collate_fn= combines samples of a Dataset"),
        (Squares(), {"batch_size": 20, "drop_last": True}, "drop_last=True leaves no step: a step needs 20"),
        (DataLoader(Squares(), 4), {"batch_size": 8}, "(batch_size=) got a DataLoader; set its own option"),
        (DataLoader(Squares(), batch_sampler=[[0, 1]]), {}, "got a DataLoader with batch_sampler="),
        (DataLoader(Squares(), sampler=[3, 11]), {}, "the sampler list must yield numbers from 0 to 9"),
    ],
)  # fmt: skip
def test_data_or_options_that_do_not_fit_are_one_line(
    data: Any, options: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with _ends_with(2) as world:
        world.loader(data, **options)
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert words in line


# Micro-batches.


def _gradients(num: int, rows: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = {"x": torch.rand(rows, 4), "names": [f"{i}" for i in range(rows)], "scale": torch.tensor(2.0)}
    with ddp_hpc.distributed() as world:
        [batch] = world.loader(
            [
                {name: value[i] if name != "scale" else value for name, value in data.items()}
                for i in range(rows)
            ],
            batch_size=rows,
            collate_fn=lambda samples: {**data, "x": torch.stack([one["x"] for one in samples])},
        )
    for part in batch.micro_batches(num, model):
        assert len(part.data["names"]) == len(part.data["x"])
        assert part.data["scale"].item() == 2.0
        (model(part.data["x"]).square().mean() * part.weight).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("num", "rows"), [(4, 6), (8, 6), (3, 1)])
def test_micro_batches_have_the_gradients_of_the_whole_batch(num: int, rows: int) -> None:
    for ours, whole in zip(_gradients(num, rows), _gradients(1, rows), strict=True):
        torch.testing.assert_close(ours, whole)


def test_every_rank_gets_the_same_number_of_micro_batches() -> None:
    with ddp_hpc.distributed() as world:
        [batch] = world.loader((torch.arange(2.0), torch.zeros(2)), shuffle=False)
    parts = list(batch.micro_batches(4))
    assert [(part.src.tolist(), part.weight) for part in parts] == [
        ([0.0], 0.0), ([0.0], 0.5), ([0.0], 0.0), ([1.0], 0.5),
    ]  # fmt: skip
    assert {(part.step, part.epoch, part.ends_epoch) for part in parts} == {(1, 1, True)}


@pytest.mark.parametrize(
    ("data", "num", "words"),
    [
        ([{"x": X}], 0, "micro_batches(0): the number of parts must be 1 or greater"),
        (["text"], 2, "contains no tensors that can be divided by samples"),
        ([(X, torch.zeros(5)), (X, torch.zeros(5))], 2, ""),
    ],
)
def test_batches_that_cannot_be_divided_are_refused(data: Any, num: int, words: str) -> None:
    [batch] = _batches(data)
    if not words:
        batch = batch._replace(tgt=batch.tgt.T)  # as from a collate_fn with the time first
        words = "contains tensors of shapes (2, 3, 1) and (5, 2)"
    with pytest.raises(ddp_hpc.RequestError) as caught:
        list(batch.micro_batches(num))
    assert words in str(caught.value)
