"""The check of the data of a run for non-finite values.

Ranks are threads, except in two real runs at the end.
"""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from ddp_hpc.base.errors import DataError, ReportedElsewhereError
from ddp_hpc.data.samples import Samples
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.store_comm import StoreComm
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.prepare_data import open_data
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.telemetry.progress import Progress
from tests.discovery.simulated_mpi import on_all_ranks
from tests.stores import store_in_thread

from .forked import Forks


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """16 finite samples and a test split of 4."""
    path = tmp_path / "train.h5"
    with h5py.File(path, "w") as file:
        for name, num in (("", 16), ("test/", 4)):
            file[f"{name}src"] = np.arange(num * 10, dtype=np.float32).reshape(num, 10)
            file[f"{name}tgt"] = np.zeros((num, 1), dtype=np.float32)
    return path


here = threading.local()


def prepared(config: TrainConfig, num_nodes: int = 1, ranks_per_node: int = 2) -> tuple[list[Any], str]:
    """The samples or error of each rank, and the output."""
    said = io.StringIO()
    size = num_nodes * ranks_per_node

    def of_rank(rank: int) -> Samples:
        here.node, local_rank = divmod(rank, ranks_per_node)
        world = World(
            rank=rank,
            world_size=size,
            local_rank=local_rank,
            local_size=ranks_per_node,
            hostname=f"node{here.node}",
            launcher="hydra",
        )
        comm = StoreComm(served.client(), rank, size, 20.0)
        group = Group(
            world=world, comm=comm, device=torch.device("cpu"), backend="none", threads=1, placement=""
        )
        return open_data(config, group, Progress(rank == 0, said))

    with store_in_thread() as served:
        return on_all_ranks(of_rank, size), said.getvalue()


@pytest.mark.parametrize(("ranks", "bad"), [(1, (3, 9)), (3, (9, 12)), (5, (12, 15)), (20, (9, 15))])
def test_the_first_non_finite_sample_of_the_file_is_reported_by_any_rank(
    data: Path, ranks: int, bad: tuple[int, ...]
) -> None:
    with h5py.File(data, "r+") as file:
        for number in bad:
            file["src"][number, 4] = np.nan
    opened, _ = prepared(TrainConfig.of(data=data, check_data=True), ranks_per_node=ranks)
    assert type(opened[0]) is DataError
    assert str(opened[0]) == (
        f"{data}: sample {bad[0]} of src contains a NaN. Fix the file, or omit --check-data"
    )
    assert all(isinstance(error, ReportedElsewhereError) for error in opened[1:])


def test_the_test_split_is_checked(data: Path) -> None:
    with h5py.File(data, "r+") as file:
        file["test/tgt"][2] = np.inf
    opened, _ = prepared(TrainConfig.of(data=data, check_data=True))
    assert "sample 2 of test/tgt contains an infinity" in str(opened[0])


def test_two_real_ranks_train_on_checked_data(data: Path, tmp_path: Path, forks: Forks) -> None:
    options = ["--model", "linear", "--data", str(data), "--epochs", "1", "--batch-size", "4"]
    said = forks.run(*options, "--check-data", cwd=tmp_path, ranks=2).words()
    assert said.count("checked: 16 samples are finite") == 1
    assert "done: 2 steps, 16 samples" in said


def test_non_finite_data_is_one_error(data: Path, tmp_path: Path, forks: Forks) -> None:
    with h5py.File(data, "r+") as file:
        file["src"][9, 4] = np.nan
    job = forks.start("--model", "linear", "--data", str(data), "--check-data", cwd=tmp_path, ranks=2)
    assert job.wait() == [2, 2], job.words()
    (line,) = job.errors()
    assert "sample 9 of src contains a NaN" in line
