"""The share of cores and memory of one GPU, from the answers of Slurm and PBS.

The commands are stand-ins that print what the real ones print: the answers of Slurm have the fields of
version 22.05 and of public documentation of several sites, those of PBS have the fields of OpenPBS's
pbsnodes. tests/slurm/test_device_share.py asks a real Slurm.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.schedulers.device_share import DeviceShare
from ddp_hpc.schedulers.pbs import device_share as pbs
from ddp_hpc.schedulers.slurm import device_share as slurm

ROWS = """\
cpu*|cn[001-100]|128|515000|(null)
a100|ga[01-30]|128|515558|gpu:a100:4(S:0-7)
a100|gb01|64|253400|gpu:a100:2(S:0-1),lscratch:3200
rtx|gr[1-2,7]|48|192000|gpu:3090:8
mig|gm1|64|512000|gpu:1g.5gb:7,gpu:a100:1
"""
NODES = {
    "ga01": "CPUEfctv=120 CPUTot=128 RealMemory=515558 MemSpecLimit=15558 ThreadsPerCore=2",
    "gb01": "CPUTot=64 Gres=gpu:a100:2(S:0-1),lscratch:3200 RealMemory=253400 ThreadsPerCore=2",
    "gr1": "CPUEfctv=48 CPUTot=48 Gres=gpu:3090:8 RealMemory=192000 ThreadsPerCore=1",
    "gm1": "CPUEfctv=64 CPUTot=64 RealMemory=512000 ThreadsPerCore=1",
}
PARTITION = "PartitionName=x MaxCPUsPerNode=UNLIMITED JobDefaults=(null) MaxMemPerNode=UNLIMITED"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in front of the PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def stand_in(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


def install_slurm(folder: Path, partition: str = PARTITION) -> None:
    stand_in(folder, "sinfo", f"cat <<'E'\n{ROWS}E")
    nodes = "\n".join(
        f"  *,{name},*) echo 'NodeName={name} Arch=x86_64 {fields} OS=Linux 5.14 #1 SMP Partitions=x';;&"
        for name, fields in NODES.items()
    )
    stand_in(
        folder,
        "scontrol",
        f"if [[ $3 == partition ]]; then echo '{partition}'; exit; fi\ncase ,$4, in\n{nodes}\nesac",
    )


def numbers(share: DeviceShare | None) -> tuple[int, int, int] | None:
    return share and (share.cores, share.threads, share.memory_mib)


@pytest.mark.parametrize(
    ("partition", "gpus", "expected"),
    [
        ("a100", 1, (15, 30, 125000)),  # the smallest share of both kinds of nodes, without the system's part
        ("rtx", 2, (6, 6, 24000)),
        ("mig", 1, (8, 8, 64000)),
        ("", 1, None),  # the default partition has no GPUs
        ("cpu", 1, None),
    ],
)
def test_the_share_of_a_gpu_in_a_partition_of_slurm(
    commands: Path, partition: str, gpus: int, expected: tuple[int, int, int] | None
) -> None:
    install_slurm(commands)
    assert numbers(slurm.device_share(partition, gpus)) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("JobDefaults=DefCpuPerGPU=12,DefMemPerGPU=94000", (6, 12, 94000)),
        ("JobDefaults=DefCpuPerGPU=14 DefMemPerCPU=6000 MaxMemPerCPU=6000", (7, 14, 84000)),
        ("MaxCPUsPerNode=96 JobDefaults=(null) MaxMemPerNode=400000", (12, 24, 100000)),
    ],
)
def test_the_defaults_and_limits_of_the_partition_count(
    commands: Path, fields: str, expected: tuple[int, int, int]
) -> None:
    install_slurm(commands, f"PartitionName=a100 {fields}")
    assert numbers(slurm.device_share("a100", 4)) == expected


def test_more_gpus_than_a_node_of_the_partition_has_are_refused(commands: Path) -> None:
    install_slurm(commands)
    with pytest.raises(RequestError, match=r"partition a100 have at most 4. Use --gpus-per-node 4"):
        slurm.device_share("a100", 8)


PBS_NODES = """{"nodes":{
"gpunode1":{"Mom":"gpunode1","state":"free","resources_available":{"mem":"97586176kb","ncpus":24,"ngpus":3}},
"aice003":{"queue":"test","resources_available":{"mem":"514260mb","ncpus":64,"ngpus":2}},
"n002":{"resources_available":{"mem":"527685384kb","ncpus":32,"ngpus":4,"Qlist":"gpu,long"}},
"n001":{"resources_available":{"mem":"263842692kb","ncpus":48,"ngpus":"unlimited"}},
"n003":{"resources_available":null}}}"""


@pytest.mark.parametrize(
    ("queue", "gpus", "expected"),
    [
        ("", 1, (8, 8, 31766)),
        ("gpu", 4, (8, 8, 128829)),
        ("test", 2, (8, 8, 31766)),
    ],
)
def test_the_share_of_a_gpu_on_the_nodes_of_pbs(
    commands: Path, queue: str, gpus: int, expected: tuple[int, int, int]
) -> None:
    stand_in(commands, "pbsnodes", f"cat <<'E'\n{PBS_NODES}\nE")
    assert numbers(pbs.device_share(queue, gpus)) == expected


@pytest.mark.parametrize("script", ["exit 1", "echo '[]'", "head -c 9000000 /dev/zero"])
@pytest.mark.parametrize("name", ["pbsnodes", "sinfo"])
def test_an_answer_that_cannot_be_read_is_no_answer(commands: Path, name: str, script: str) -> None:
    stand_in(commands, name, script)
    assert pbs.device_share("gpu", 1) is None
    assert slurm.device_share("gpu", 1) is None


def test_a_scheduler_that_does_not_answer_is_not_waited_for(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "LIMIT_S", 0.2)
    stand_in(commands, "sinfo", "sleep 60")
    assert slurm.device_share("gpu", 1) is None
