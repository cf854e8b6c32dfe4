"""The placement of one rank: host, device, CPUs, NUMA nodes, versions. Standard library only.

The sources are sched_getaffinity and sysfs (Linux: Documentation/ABI/stable/sysfs-devices-system-cpu and
-node, testing/sysfs-bus-pci). A container may hide any of these files: a value that cannot be read is
left out, and no check depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddp_hpc.base.errors import LaunchError
from ddp_hpc.base.hostlist import expand_counts
from ddp_hpc.discovery.launcher_environment import Environ
from ddp_hpc.discovery.world import World

SYSFS = Path("/sys")


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of a rank: `cuda:1` or `cpu`, its globally unique identity, and its PCI address.

    `identity` and `pci` are empty for a CPU, and if torch does not provide them.
    """

    name: str = "cpu"
    identity: str = ""
    pci: str = ""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """One row of the placement table. CPUs are hardware threads, in the kernel's notation: `0-7,64-71`.

    An empty string or None stands for an unknown value.
    """

    rank: int
    host: str
    local_rank: int
    device: str
    identity: str
    pci: str
    device_numa: int | None
    """The NUMA node that the device is attached to."""
    device_cpus: str
    """The CPUs of that NUMA node."""
    cpus: str
    """The CPUs that the rank can use."""
    cores: str
    """The physical cores of these CPUs. A core has the number of its first CPU."""
    threads_per_core: int
    numa: str
    """The NUMA nodes of the rank's CPUs."""
    online_cpus: int
    allotted_cpus: int | None
    """The number of CPUs that the job has on this node, if known."""
    omp_num_threads: str
    versions: dict[str, str] = field(default_factory=dict)


def own_place(
    world: World,
    device: Device,
    cpus: Sequence[int],
    versions: dict[str, str],
    environ: Environ,
    sysfs: Path = SYSFS,
) -> RankPlace:
    """Returns this rank's row of the placement table, given its CPUs. Not collective."""
    attached = sysfs / "bus/pci/devices" / device.pci if device.pci else None
    numa = _number(attached / "numa_node") if attached else None
    has_numa = numa is not None and numa >= 0  # it is -1 if the firmware does not report it
    return RankPlace(
        rank=world.rank,
        host=world.hostname,
        local_rank=world.local_rank,
        device=device.name,
        identity=device.identity,
        pci=device.pci,
        device_numa=numa if has_numa else None,
        device_cpus=_text(attached / "local_cpulist") if attached and has_numa else "",
        cpus=cpu_list(cpus),
        cores=cpu_list(_siblings(cpu, sysfs)[0] for cpu in cpus),
        threads_per_core=len(_siblings(cpus[0], sysfs)),
        numa=cpu_list(_numa_nodes(set(cpus), sysfs)),
        online_cpus=len(cpu_numbers(_text(sysfs / "devices/system/cpu/online"))) or len(cpus),
        allotted_cpus=_allotted_cpus(environ),
        omp_num_threads=environ.get("OMP_NUM_THREADS", ""),
        versions=versions,
    )


def cpu_numbers(text: str) -> list[int]:
    """Returns the numbers of a list such as `0-3,8`, or nothing if the text is not such a list."""
    numbers: list[int] = []
    with suppress(ValueError):
        for part in text.split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
        return numbers
    return []


def cpu_list(numbers: Iterable[int]) -> str:
    """Returns the distinct numbers, in ascending order, as a list such as `0-3,8`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _siblings(cpu: int, sysfs: Path) -> list[int]:
    """Returns the CPUs of one physical core, or only the given CPU if sysfs has no information."""
    topology = sysfs / f"devices/system/cpu/cpu{cpu}/topology"
    return cpu_numbers(_text(topology / "thread_siblings_list")) or [cpu]


def _numa_nodes(cpus: set[int], sysfs: Path) -> list[int]:
    return [
        int(directory.name.removeprefix("node"))
        for directory in (sysfs / "devices/system/node").glob("node[0-9]*")
        if cpus.intersection(cpu_numbers(_text(directory / "cpulist")))
    ]


def _allotted_cpus(environ: Environ) -> int | None:
    """Returns the number of CPUs that the job has on each node, the lowest if they differ; None if unknown.

    DDP_HPC_CPUS_PER_NODE comes before the number of Slurm. PBS does not set a reliable number, because NCPUS
    depends on the `ompthreads` of the chunk.
    """
    if (given := environ.get("DDP_HPC_CPUS_PER_NODE", "")).isdecimal() and int(given):
        return int(given)
    # The job's variable is used, because srun without --cpus-per-task creates a step with one CPU per task.
    with suppress(LaunchError):
        return min(expand_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", "")))
    return None


def _number(path: Path) -> int | None:
    with suppress(ValueError):
        return int(_text(path))
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
