"""The data of a run on its nodes: copies, warnings without a copy, and the check for non-finite values.

Ranks are threads, except in two real runs at the end.
"""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from ddp_hpc.base.errors import DataError, ReportedElsewhereError, RequestError
from ddp_hpc.data.samples import Samples
from ddp_hpc.data.staging import NotStagedError, Staged, stage_file
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.store_comm import StoreComm
from ddp_hpc.training import prepare_data as prepare
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


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Makes copies fail on some nodes. The storage of a node is a numbered subdirectory of --stage."""
    reasons: dict[int, str] = {}

    def stage_on_node(source: Path, folder: Path, **options: Any) -> Staged:
        if here.node in reasons:
            raise NotStagedError(reasons[here.node])
        return stage_file(source, folder / str(here.node), **options)

    monkeypatch.setattr(prepare, "stage_file", stage_on_node)
    return reasons


def warnings(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("warning: ")]


def test_one_copy_per_node_is_made_and_read_by_all_its_ranks(
    data: Path, tmp_path: Path, failing: dict[int, str]
) -> None:
    opened, said = prepared(TrainConfig.of(data=data, stage=tmp_path / "local"), num_nodes=2)
    copies = [next((tmp_path / "local" / node).iterdir()) for node in "01"]
    assert [samples.path for samples in opened] == [copies[0], copies[0], copies[1], copies[1]]
    assert f"made the copy {copies[0]} (" in said
    assert warnings(said) == []


def test_a_second_run_reports_that_it_reuses_the_copy(data: Path, tmp_path: Path) -> None:
    config = TrainConfig.of(data=data, stage=tmp_path / "local")
    prepared(config)
    assert "using the copy" in prepared(config)[1]


def test_nodes_without_a_copy_read_the_file_with_one_warning(
    data: Path, tmp_path: Path, failing: dict[int, str]
) -> None:
    failing.update({1: "/local has 3.0 GiB free of 10.0 GiB needed", 3: "something else"})
    config = TrainConfig.of(data=data, stage=tmp_path / "local")
    opened, said = prepared(config, num_nodes=4, ranks_per_node=1)
    assert [samples.path == data for samples in opened] == [False, True, False, True]
    assert warnings(said) == [
        f"warning: --stage {config.data.stage}: 2 of 4 nodes read {data} directly: "
        "node1: /local has 3.0 GiB free of 10.0 GiB needed"
    ]


def test_a_rank_that_cannot_read_the_copy_reads_the_file(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on systems where each task has a private /tmp."""
    gone = Staged(path=tmp_path / "another" / "train.h5", reused=False, num_bytes=1, elapsed_s=0.0)
    monkeypatch.setattr(prepare, "stage_file", lambda *_, **__: gone)
    opened, said = prepared(TrainConfig.of(data=data, stage=tmp_path / "local"))
    assert [samples.path for samples in opened] == [data, data]
    assert warnings(said)[0].endswith(f"node0: rank 0 cannot read {gone.path}")


def test_an_invalid_file_is_not_copied(data: Path, tmp_path: Path) -> None:
    os.truncate(data, 600)
    opened, _ = prepared(TrainConfig.of(data=data, stage=tmp_path / "local"))
    assert isinstance(opened[0], RequestError)
    assert str(data) in str(opened[0])
    assert not (tmp_path / "local").exists()


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


def test_two_real_ranks_train_on_the_copy_of_checked_data(data: Path, tmp_path: Path, forks: Forks) -> None:
    options = ["--model", "linear", "--data", str(data), "--epochs", "1", "--batch-size", "4"]
    said = forks.run(*options, "--stage", "local", "--check-data", cwd=tmp_path, ranks=2).words()
    (copy,) = (tmp_path / "local").iterdir()
    assert copy.read_bytes() == data.read_bytes()
    assert said.count("made the copy local/train-") == 1
    assert said.count("checked: 16 samples are finite") == 1
    assert "done: 2 steps, 16 samples" in said


def test_non_finite_data_and_an_unusable_stage_directory_are_one_warning_and_one_error(
    data: Path, tmp_path: Path, forks: Forks
) -> None:
    with h5py.File(data, "r+") as file:
        file["src"][9, 4] = np.nan
    options = ["--model", "linear", "--data", str(data), "--stage", "/proc/none", "--check-data"]
    job = forks.start(*options, cwd=tmp_path, ranks=2)
    assert job.wait() == [2, 2], job.words()
    (line,) = job.errors()
    assert "sample 9 of src contains a NaN" in line
    assert len(warnings(job.words())) == 1
    assert "1 of 1 nodes read" in job.words()


def test_an_empty_stage_directory_is_reported_as_an_unset_variable(tmp_path: Path, forks: Forks) -> None:
    job = forks.start("--stage", "", cwd=tmp_path, ranks=1)
    assert job.wait() == [2]
    assert "error: --stage is empty; give a directory" in job.words()
