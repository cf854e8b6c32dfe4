"""The placement check in real ranks: its findings, its output, and how it ends a job."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_hpc.base.errors import ReportedElsewhereError, RequestError
from ddp_hpc.discovery.rank_placement import Device
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.store_comm import StoreComm
from ddp_hpc.training.process_group import check_placement as placement
from ddp_hpc.training.process_group.check_placement import check_placement
from ddp_hpc.training.process_group.devices import device_place, pick_device
from tests.discovery.simulated_mpi import on_all_ranks
from tests.stores import Served, store_in_thread

from .forked import Forks
from .runs import LINEAR

BOUND = "tests.training.bound"
SIZES = ["--num-samples", "32", "--max-steps", "1", "--batch-size", "16", *LINEAR]
several_cpus = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="binding to one of one CPU is no binding")


def placement_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("placement: ", "warning: "))]


# test_run.py tests a placement without problems.


@several_cpus
def test_ranks_bound_to_one_core_are_a_warning(tmp_path: Path, forks: Forks) -> None:
    cpu = min(os.sched_getaffinity(0))
    job = forks.start(*SIZES, cwd=tmp_path, ranks=2, program=BOUND)
    assert job.wait() == [0, 0], job.words()
    first, warning = placement_lines(job.words())
    assert first == "placement: 2 ranks on 1 node, 1 CPU per rank, 1 warning"
    assert warning.startswith("warning: all 2 ranks on ")
    assert f"are bound to the same CPU {cpu} of {os.cpu_count()}" in warning


def test_each_rank_raises_its_limit_on_open_files(tmp_path: Path, forks: Forks) -> None:
    job = forks.start(
        *SIZES, "--max-steps", "100000", "--epochs", "100000", cwd=tmp_path, ranks=2, program=BOUND,
        env={"LIMIT": "200:1000"},
    )  # fmt: skip
    while "placement: " not in job.words():
        assert job.running(), job.words()
        time.sleep(0.01)
    limits = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in job.pids]
    job.kill()
    assert limits == [(1000, 1000)] * 2
    assert placement_lines(job.words())[0].endswith(", no problems found")


def test_an_unwritable_run_directory_is_reported_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DDP_HPC_RUN_DIR", str(tmp_path / "file" / "run"))
    (line,) = check_placement(None, world_of(0, 1), torch.device("cpu"), "none")
    assert "placement.txt: cannot be written: " in line


def test_a_replica_on_more_gpus_than_are_visible_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device_count=lambda: 1))
    with pytest.raises(RequestError, match="--devices-per-rank 2: rank 0 on n1 sees only 1; "):
        pick_device("cuda", world_of(0, 2), 2)


# Several ranks in threads, with simulated GPUs


@pytest.fixture
def store() -> Iterator[Served]:
    with store_in_thread() as served:
        yield served


def world_of(rank: int, size: int) -> World:
    return World(
        rank=rank, world_size=size, local_rank=rank, local_size=size, hostname="n1", launcher="slurm"
    )


def checked(store: Served, monkeypatch: pytest.MonkeyPatch, devices: list[Device], backend: str) -> list[Any]:
    """The result or error of each rank's check."""
    here = threading.local()
    monkeypatch.setattr(placement, "device_place", lambda _: devices[here.rank])

    def of_rank(rank: int) -> tuple[str, ...]:
        here.rank = rank
        comm = StoreComm(store.client(), rank, len(devices), 20.0)
        return check_placement(comm, world_of(rank, len(devices)), torch.device("cpu"), backend)

    return on_all_ranks(of_rank, len(devices))


def test_a_shared_gpu_under_nccl_ends_the_job_with_one_error_and_a_table(
    store: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DDP_HPC_RUN_DIR", str(tmp_path))
    devices = [Device(name="cuda:0", identity=f"GPU-{gpu}") for gpu in (0, 1, 1)]
    first, *others = checked(store, monkeypatch, devices, "nccl")
    assert isinstance(first, RequestError)
    assert first.on_all_ranks
    assert "ranks 1 and 2 on n1 would share one device (GPU-1): NCCL does not allow this" in str(first)
    assert all(isinstance(other, ReportedElsewhereError) for other in others)
    assert "error: ranks 1 and 2 on n1" in (tmp_path / "placement.txt").read_text()


def test_ranks_with_one_visible_gpu_each_are_accepted(store: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    # With torchrun --virtual-local-rank, Slurm's --gpus-per-task or containers, each rank uses cuda:0.
    devices = [Device(name="cuda:0", identity=f"GPU-{gpu}") for gpu in (0, 1)]
    first, other = checked(store, monkeypatch, devices, "nccl")
    assert first[0].startswith("placement: 2 ranks on 1 node, 2 devices, ")
    assert not any("share" in line for line in first)
    assert other == ()


def test_a_shared_gpu_under_gloo_is_a_warning(store: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [Device(name="cuda:0", identity="GPU-0")] * 2
    first, other = checked(store, monkeypatch, devices, "gloo")
    assert first[0].startswith("placement: 2 ranks on 1 node, 1 device, ")
    assert any("gloo allows this" in line for line in first[1:])
    assert other == ()


@pytest.mark.parametrize(
    ("properties", "pci"),
    [
        ({"uuid": "GPU-1", "pci_domain_id": 0, "pci_bus_id": 0xC7, "pci_device_id": 0}, "0000:c7:00.0"),
        ({"uuid": "GPU-1", "pci_bus_id": 1}, ""),
    ],
)
def test_a_gpu_has_the_pci_address_of_sysfs(
    monkeypatch: pytest.MonkeyPatch, properties: dict[str, Any], pci: str
) -> None:
    # Simulates torch.cuda.get_device_properties. Never run on a GPU.
    module = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(**properties))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert device_place(torch.device("cuda", 1)) == Device(name="cuda:1", identity="GPU-1", pci=pci)
