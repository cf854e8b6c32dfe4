"""The placement check in real ranks: what it finds, writes and prints, and how it ends a job."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_hpc.errors import RendezvousError, ReportedElsewhereError, RequestError
from ddp_hpc.training import placement
from ddp_hpc.training.devices import device_place
from ddp_hpc.training.placement import check_placement
from ddp_hpc.training.store_comm import PrefixStore, StoreComm, TCPStore
from ddp_hpc.world.rank_place import Device
from ddp_hpc.world.topology import World
from tests.world.stand_in import on_all_ranks

from .forked import Forks
from .runs import LINEAR

BOUND = "tests.training.bound"
SIZES = ["--num-samples", "32", "--max-steps", "1", "--batch-size", "16", *LINEAR]
several_cpus = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="binding to one of one CPU is no binding")


def placement_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("placement: ", "warning: "))]


# What is found where nothing is amiss: test_run.py.


@several_cpus
def test_ranks_that_are_bound_to_one_core_are_warned_of(tmp_path: Path, forks: Forks) -> None:
    cpu = min(os.sched_getaffinity(0))
    job = forks.start(*SIZES, cwd=tmp_path, ranks=2, program=BOUND)
    assert job.wait() == [0, 0], job.words()
    first, warning = placement_lines(job.words())
    assert first == "placement: 2 ranks on 1 node, 1 CPU a rank, 1 warning"
    assert warning.startswith("warning: all 2 ranks on ")
    assert f"are bound to the same CPU {cpu} of {os.cpu_count()}" in warning


@several_cpus
def test_a_lone_rank_on_one_core_is_warned_of(tmp_path: Path, forks: Forks) -> None:
    cpu = min(os.sched_getaffinity(0))
    job = forks.start(*SIZES, cwd=tmp_path, ranks=1, program=BOUND, env={"OMP_NUM_THREADS": "8"})
    assert job.wait() == [0], job.words()
    assert f"warning: rank 0 on {os.uname().nodename.partition('.')[0]} has CPU {cpu} of" in job.words()
    assert "with OMP_NUM_THREADS=8: all its threads" in job.words()


def test_a_run_folder_that_cannot_be_written_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DDP_HPC_RUN_DIR", str(tmp_path / "file" / "run"))
    (line,) = check_placement(None, world_of(0, 1), torch.device("cpu"), "none")
    assert "placement.txt: cannot be written: " in line


# Several ranks in threads, with GPUs that this machine need not have


@pytest.fixture
def store() -> TCPStore:
    return TCPStore(
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


def world_of(rank: int, size: int) -> World:
    return World(
        rank=rank, world_size=size, local_rank=rank, local_size=size, hostname="n1", launcher="slurm"
    )


def checked(store: Any, monkeypatch: pytest.MonkeyPatch, devices: list[Device], backend: str) -> list[Any]:
    """What each rank's check gave or raised."""
    here = threading.local()
    monkeypatch.setattr(placement, "device_place", lambda _: devices[here.rank])

    def of_rank(rank: int) -> tuple[str, ...]:
        here.rank = rank
        comm = StoreComm(PrefixStore("comm", store.clone()), rank, len(devices), 20.0)
        return check_placement(comm, world_of(rank, len(devices)), torch.device("cpu"), backend)

    return on_all_ranks(of_rank, len(devices))


def test_a_shared_gpu_ends_the_job_once_under_nccl_and_leaves_the_table(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DDP_HPC_RUN_DIR", str(tmp_path))
    devices = [Device(name="cuda:0", identity=f"GPU-{gpu}") for gpu in (0, 1, 1)]
    first, *others = checked(store, monkeypatch, devices, "nccl")
    assert isinstance(first, RequestError)
    assert first.everywhere
    assert "ranks 1 and 2 on n1 would share one device (GPU-1): NCCL refuses that" in str(first)
    assert all(isinstance(other, ReportedElsewhereError) for other in others)
    assert "error: ranks 1 and 2 on n1" in (tmp_path / "placement.txt").read_text()


def test_only_rank_0_has_something_to_say(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [Device(name="cuda:0", identity="GPU-0")] * 2
    first, other = checked(store, monkeypatch, devices, "gloo")
    assert first[0].startswith("placement: 2 ranks on 1 node, 1 device, ")
    assert any("gloo allows it" in line for line in first[1:])
    assert other == ()


def test_a_rank_that_does_not_come_is_named(store: TCPStore) -> None:
    comm = StoreComm(PrefixStore("comm", store), 0, 3, 0.3)
    store.set("comm/1/the placement/2", "{}")
    with pytest.raises(RendezvousError, match="for the placement: rank 1 did not come"):
        check_placement(comm, world_of(0, 3), torch.device("cpu"), "gloo")


@pytest.mark.parametrize(
    ("properties", "pci"),
    [
        ({"uuid": "GPU-1", "pci_domain_id": 0, "pci_bus_id": 0xC7, "pci_device_id": 0}, "0000:c7:00.0"),
        ({"uuid": "GPU-1", "pci_domain_id": 0x10001, "pci_bus_id": 1, "pci_device_id": 2}, "10001:01:02.0"),
        ({"uuid": "GPU-1", "pci_bus_id": 1}, ""),
    ],
)
def test_a_gpu_is_named_as_sysfs_names_it(
    monkeypatch: pytest.MonkeyPatch, properties: dict[str, Any], pci: str
) -> None:
    # Composed: what torch.cuda.get_device_properties gives. Never run on a GPU.
    module = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(**properties))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert device_place(torch.device("cuda", 1)) == Device(name="cuda:1", identity="GPU-1", pci=pci)
