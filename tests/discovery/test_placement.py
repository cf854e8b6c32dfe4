"""The number of threads per rank, and the check of the placement of all ranks."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.discovery.cpu_affinity import threads_per_rank
from ddp_hpc.discovery.placement_problems import check, summary
from ddp_hpc.discovery.rank_placement import Device, RankPlace, cpu_list, cpu_numbers, own_place
from ddp_hpc.discovery.world import World


@pytest.mark.parametrize(
    ("own", "of_node", "environ", "launcher", "threads", "why"),
    [
        ([0, 1], [[0, 1], [2, 3]], {}, "hydra", 2, "2 cores"),
        ([0, 1, 2, 3], [[0, 1, 2, 3]] * 2, {}, "hydra", 2, "4 cores shared by 2 ranks"),
        ([0, 1], [[0, 1]] * 8, {}, "hydra", 1, "2 cores shared by 8 ranks"),
        ([0, 1, 2, 3], [[0, 1, 2, 3]], {"OMP_NUM_THREADS": "2"}, "hydra", 2, "OMP_NUM_THREADS"),
        # PBS sets it to the cores of the whole chunk in every rank.
        ([0, 1], [[0, 1], [2, 3]], {"OMP_NUM_THREADS": "64"}, "pals", 2, "2 cores"),
        # torchrun sets it to 1 if it was unset.
        ([0, 1], [[0, 1]], {"OMP_NUM_THREADS": "1"}, "torchrun", 2, "2 cores"),
        ([0, 1], [[0, 1]], {"OMP_NUM_THREADS": "1"}, "slurm", 1, "OMP_NUM_THREADS"),
        ([0, 1], [[0, 1]], {"OMP_NUM_THREADS": "0"}, "slurm", 2, "2 cores"),
        ([0, 1], [[0, 1]], {"OMP_NUM_THREADS": "many"}, "slurm", 2, "2 cores"),
        ([0], [], {}, "slurm", 1, "1 cores"),
    ],
)
def test_threads_are_this_ranks_share_of_the_cores(
    own: list[int], of_node: list[list[int]], environ: dict[str, str], launcher: str, threads: int, why: str
) -> None:
    assert threads_per_rank(own, of_node, environ, launcher) == (threads, why)


# The placement of all ranks


def world(rank: int = 0, host: str = "n1", local_rank: int = 0) -> World:
    return World(
        rank=rank, world_size=2, local_rank=local_rank, local_size=2, hostname=host, launcher="slurm"
    )


def place(rank: int, host: str = "n1", **values: Any) -> RankPlace:
    """A rank of a healthy node like a DGX A100: 8 GPUs, 128 cores of 2 threads, 8 NUMA nodes of 16 cores.

    Local rank i has GPU i and all CPUs of the NUMA node that this GPU is at.
    """
    local_rank = values.pop("local_rank", rank % 8)
    cores = f"{16 * local_rank}-{16 * local_rank + 15}"
    cpus = f"{cores},{16 * local_rank + 128}-{16 * local_rank + 143}"
    given = {
        "device": f"cuda:{local_rank}",
        "identity": f"{host}-gpu-{local_rank}",
        "pci": f"0000:{local_rank:02x}:00.0",
        "device_numa": local_rank,
        "device_cpus": cpus,
        "cpus": cpus,
        "cores": cores,
        "threads_per_core": 2,
        "numa": str(local_rank),
        "online_cpus": 256,
        "allotted_cpus": None,
        "omp_num_threads": "16",
        "versions": {"python": "3.11.7", "torch": "2.8.0", "nccl": "2.27.3"},
        **values,
    }
    return RankPlace(rank=rank, host=host, local_rank=local_rank, **given)


def on_cpus(rank: int, cpus: str, host: str = "n1", **values: Any) -> RankPlace:
    """A rank without a GPU, on a node of 64 cores with one thread each."""
    given = {"device": "cpu", "identity": "", "pci": "", "device_numa": None, "device_cpus": ""}
    given |= {"threads_per_core": 1, "online_cpus": 64, "omp_num_threads": "", "numa": "0", **values}
    return place(rank, host, cpus=cpus, cores=cpus, **given)


def nodes(count: int = 2, **values: Any) -> list[RankPlace]:
    """Returns all ranks of `count` nodes without problems."""
    return [place(rank, f"n{rank // 8 + 1}", **values) for rank in range(8 * count)]


def found(places: list[RankPlace], backend: str = "nccl") -> list[str]:
    """Returns the findings; each one is a single line."""
    findings = check(places, backend)
    assert not any("\n" in finding.text for finding in findings)
    return [finding.text for finding in findings]


def test_well_placed_ranks_have_no_findings() -> None:
    assert found(nodes()) == []
    assert summary(nodes()) == "16 ranks on 2 nodes, 16 devices, 32 CPUs per rank"
    # Without a UUID the PCI address identifies a device, and each node has the same addresses.
    assert summary(nodes(identity="")) == summary(nodes())


# As on MI250 GPUs with ROCm 6.3.3: https://github.com/ROCm/legacy-rocm-build/issues/5480.
SAME_UUID = "58580000-0000-0000-0000-000000000000"
ACCEPTED = {
    "unbound ranks that share all CPUs of a node": nodes(cpus="0-255", cores="0-127", numa="0-7"),
    "GPUs with the same UUID and different PCI addresses": nodes(identity=SAME_UUID),
    "devices without UUID and PCI address": nodes(identity="", pci="", device_numa=None, device_cpus=""),
    "more ranks than cores on a small machine": [on_cpus(rank, "0-1", online_cpus=2) for rank in range(8)],
    "ranks that share the few CPUs of a job": [on_cpus(rank, "0-7", allotted_cpus=8) for rank in range(4)],
    # No scheduler states the CPUs of the job.
    "ranks that share the few CPUs of a container": [on_cpus(rank, "0-7") for rank in range(4)],
    "a single rank bound to some CPUs of the job": [on_cpus(0, "0-7", allotted_cpus=64)],
    "one core per rank of a small job": [on_cpus(rank, str(rank), allotted_cpus=4) for rank in range(4)],
    # 8 CPUs are 4 cores with two threads each.
    "one thread per rank if there are no more cores": [
        on_cpus(rank, str(rank), allotted_cpus=8, threads_per_core=2) for rank in range(4)
    ],
    "two ranks that share a socket": [on_cpus(rank, "0-31" if rank < 2 else "32-63") for rank in range(4)],
}


@pytest.mark.parametrize("places", ACCEPTED.values(), ids=ACCEPTED)
def test_useful_placements_have_no_findings(places: list[RankPlace]) -> None:
    assert found(places, "gloo" if places[0].device == "cpu" else "nccl") == []


def test_two_ranks_on_one_gpu_end_the_job_under_nccl() -> None:
    # Each rank sees a single GPU, and two ranks see the same one.
    places = nodes()
    places[5] = place(5, identity="n1-gpu-4", pci="0000:04:00.0", device_numa=4, device_cpus=places[5].cpus)
    first, *others = check(places, "nccl")
    assert first.ends_job
    assert first.text.startswith(
        "ranks 4 and 5 on n1 would share one device (n1-gpu-4): NCCL does not allow this"
    )
    assert others == []
    (only,) = check(places, "gloo")
    assert not only.ends_job
    assert "gloo allows this" in only.text


def test_ranks_that_are_all_bound_to_one_core_are_reported() -> None:
    places = nodes(cpus="0", cores="0", device_cpus="")
    (text,) = found(places)
    assert text.startswith("all 8 ranks on n1, n2 are bound to the same CPU 0 of 256")
    assert "srun --cpus-per-task=N" in text


def test_ranks_bound_to_the_cpus_of_a_single_task_are_reported() -> None:
    # An mpiexec that srun started with --cpus-per-task for one rank.
    places = [on_cpus(rank, "0-7", allotted_cpus=32) for rank in range(4)]
    (text,) = found(places, "gloo")
    assert text.startswith("all 4 ranks on n1 are bound to the same CPUs 0-7 of 32")


def test_ranks_with_one_core_each_are_reported_if_more_cores_are_free() -> None:
    # srun >= 22.05 without --cpus-per-task.
    places = [on_cpus(rank, str(rank), allotted_cpus=64) for rank in range(4)]
    (text,) = found(places, "gloo")
    assert text.startswith("rank 0 on n1 has CPU 0 of 64: all its threads and loader workers share it")
    assert text.endswith("(3 more cases)")


@pytest.mark.parametrize(("omp", "is_trap"), [("8", True), ("4,2", True), ("1", False), ("many", False)])
def test_more_threads_than_the_single_core_are_reported(omp: str, is_trap: bool) -> None:
    texts = found([on_cpus(rank, str(rank), allotted_cpus=2, omp_num_threads=omp) for rank in (0, 1)], "gloo")
    assert bool(texts) == is_trap
    assert all(f"with OMP_NUM_THREADS={omp}" in text for text in texts)


def test_a_gpu_far_from_the_cores_of_its_rank_is_reported() -> None:
    # Polaris: GPU 0 is nearest to the last cores, so a binding in ascending order is wrong for every rank.
    cores = ["24-31", "16-23", "8-15", "0-7"]
    places = [
        place(
            rank, cpus=cores[3 - rank], cores=cores[3 - rank], device_cpus=cores[rank], device_numa=3 - rank
        )
        for rank in range(4)
    ]
    (text,) = found(places)
    assert text.startswith("rank 0 on n1 runs on CPUs 0-7 (NUMA node 0), far from its cuda:0 (0000:00:00.0)")
    assert "which is at NUMA node 3; bind it to CPUs among 24-31" in text
    assert text.endswith("(3 more cases)")


def test_ranks_on_two_hardware_threads_of_the_same_cores_are_reported() -> None:
    # CPUs 0-7 and 64-71 are the two threads of cores 0-7.
    places = [on_cpus(0, "0-7"), replace(on_cpus(1, "64-71"), cores="0-7")]
    (text,) = found(places, "gloo")
    assert text.startswith(
        "ranks 0 and 1 on n1 are bound to CPUs 0-7 and 64-71, which are on the same physical"
    )


def test_different_versions_are_reported_with_their_nodes() -> None:
    places = nodes(3)
    places[8:16] = [replace(p, versions={"python": "3.11.7", "torch": "2.7.1"}) for p in places[8:16]]
    torch, nccl = found(places)
    assert torch.startswith("torch differs between nodes: 2.8.0 on n1, n3, 2.7.1 on n2; load the same")
    assert nccl.startswith("nccl differs between nodes: 2.27.3 on n1, n3, none on n2;")


def test_nodes_with_different_numbers_of_ranks_are_reported() -> None:
    places = [place(rank, f"n{rank // 4}", local_rank=rank % 4) for rank in range(26)]
    (text,) = found(places)
    assert text.startswith("nodes have different numbers of ranks: 4 on n0, n1, n2 and 3 more, 2 on n6;")


def test_the_check_of_a_large_job_is_fast_and_has_few_findings() -> None:
    places = [place(rank, f"n{rank // 8}", cpus="0", cores="0") for rank in range(8192)]
    start = time.perf_counter()
    texts = found(places)
    assert time.perf_counter() - start < 2.0
    assert len(texts) == 2
    assert all(len(text) < 400 for text in texts)


# The row of a single rank


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two NUMA nodes of two cores with two threads: CPUs 0-1,4-5 and 2-3,6-7; a GPU at node 1."""
    for cpu in range(8):
        topology = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        write(topology / "thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    write(tmp_path / "devices/system/cpu/online", "0-7")
    write(tmp_path / "devices/system/node/node0/cpulist", "0-1,4-5")
    write(tmp_path / "devices/system/node/node1/cpulist", "2-3,6-7")
    write(tmp_path / "devices/system/node/node2/cpulist", "")  # memory of a GPU
    write(tmp_path / "bus/pci/devices/0000:c7:00.0/numa_node", "1")
    write(tmp_path / "bus/pci/devices/0000:c7:00.0/local_cpulist", "2-3,6-7")
    return tmp_path


GPU = Device(name="cuda:0", identity="GPU-1", pci="0000:c7:00.0")


def test_a_row_has_the_cores_numa_nodes_and_gpu_of_its_rank(sysfs: Path) -> None:
    row = own_place(world(), GPU, [1, 2, 6], {"torch": "2"}, {"OMP_NUM_THREADS": "3"}, sysfs)
    assert (row.cpus, row.cores, row.threads_per_core, row.numa) == ("1-2,6", "1-2", 2, "0-1")
    assert (row.device, row.identity, row.device_numa, row.device_cpus) == ("cuda:0", "GPU-1", 1, "2-3,6-7")
    assert (row.online_cpus, row.allotted_cpus, row.omp_num_threads) == (8, None, "3")
    assert RankPlace(**json.loads(json.dumps(asdict(row)))) == row, "it travels as JSON"


def test_an_unknown_numa_node_of_the_gpu_is_left_out(sysfs: Path) -> None:
    write(sysfs / "bus/pci/devices/0000:c7:00.0/numa_node", "-1")
    row = own_place(world(), GPU, [0], {}, {}, sysfs)
    assert (row.device_numa, row.device_cpus) == (None, "")


@pytest.mark.parametrize("text", ["", "many", "7-x", "\xff"])
def test_values_missing_in_sysfs_are_left_out(sysfs: Path, text: str) -> None:
    for path in sysfs.rglob("*"):
        if path.is_file():
            path.write_text(text)
    row = own_place(world(), GPU, [0, 5], {}, {}, sysfs)
    assert (row.cpus, row.cores, row.threads_per_core, row.numa) == ("0,5", "0,5", 1, "")
    assert (row.device_numa, row.device_cpus, row.online_cpus) == (None, "", 2)


@pytest.mark.parametrize(("per_node", "cpus"), [("64(x2)", 64), ("64,8(x3)", 8), ("", None), ("many", None)])
def test_the_cpus_of_the_job_on_a_node_come_from_slurm(sysfs: Path, per_node: str, cpus: int | None) -> None:
    environ = {"SLURM_JOB_CPUS_PER_NODE": per_node}
    assert own_place(world(), Device(), [0], {}, environ, sysfs).allotted_cpus == cpus


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([2, 1, 2, 0], "0-2"), ([9, 4, 5, 7], "4-5,7,9")]
)
def test_cpu_lists_have_the_kernels_format(numbers: list[int], text: str) -> None:
    assert cpu_list(numbers) == text
    assert cpu_numbers(text) == sorted(set(numbers))
