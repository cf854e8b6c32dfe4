"""Finds problems in the placement of the ranks, given the `RankPlace` of each rank. Performs no I/O.

Each finding is one line for the whole job: it describes the first case and counts the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddp_hpc.base.text_table import aligned
from ddp_hpc.base.units import counted
from ddp_hpc.discovery.rank_placement import RankPlace, cpu_list, cpu_numbers

_BIND = "srun --cpus-per-task=N, mpiexec --cpu-bind depth -d N (PALS), or no binding (--bind-to none)"
# Messages list at most this number of hosts, and report how many others there are.
_MAX_NAMED = 3


@dataclass(frozen=True)
class PlacementFinding:
    """A placement problem, described in one line.

    `ends_job` is true if training is impossible with this placement.
    """

    text: str
    ends_job: bool = False


def check(places: Sequence[RankPlace], backend: str) -> list[PlacementFinding]:
    """Returns all findings; those that end the job come first.

    Args:
        places: the placement of each rank, in rank order.
        backend: the process group's backend; NCCL and XCCL need one device per rank.
    """
    nodes: dict[str, list[RankPlace]] = defaultdict(list)
    for place in places:
        nodes[place.host].append(place)
    return [
        *_shared_devices(places, backend),
        *_bound_to_the_same(nodes),
        *_one_cpu(nodes),
        *_far_devices(places),
        *_overlapping(nodes),
        *_mixed_versions(places),
        *_uneven(nodes),
    ]


def _shared_devices(places: Sequence[RankPlace], backend: str) -> Iterator[PlacementFinding]:
    first_on: dict[tuple[str, ...], RankPlace] = {}
    pairs: list[tuple[RankPlace, RankPlace]] = []
    for place in places:
        # Both are compared: the MIG instances of a GPU have the same PCI address, and ROCm reports the same
        # UUID for all GPUs if it knows none (HSA_AMD_AGENT_INFO_UUID: "GPU-XX").
        names = place.identity, place.pci
        if any(names) and (first := first_on.setdefault((place.host, *names), place)) is not place:
            pairs.append((first, place))
    if not pairs:
        return
    first, second = pairs[0]
    fatal = backend in ("nccl", "xccl")
    verdict = (
        "NCCL does not allow this; start at most one rank per device of a node (or per "
        "--devices-per-rank devices), or make different devices visible to each rank"
        if fatal
        else f"{backend} allows this, but each rank gets only a part of the device"
    )
    yield PlacementFinding(
        f"ranks {first.rank} and {second.rank} on {first.host} would share one device "
        f"({first.identity or first.pci}): {verdict}{_more_cases(len(pairs) - 1)}",
        ends_job=fatal,
    )


def _bound_to_the_same(nodes: dict[str, list[RankPlace]]) -> Iterator[PlacementFinding]:
    hosts = [host for host, ranks in nodes.items() if _is_bound_to_the_same(ranks)]
    if hosts:
        ranks = nodes[hosts[0]]
        yield PlacementFinding(
            f"all {len(ranks)} ranks on {_some(hosts)} are bound to the same {_cpus(ranks[0])} of "
            f"{_usable_cpus(ranks[0])}, and slow each other down; give each rank its own CPUs: {_BIND}"
        )


def _is_bound_to_the_same(ranks: list[RankPlace]) -> bool:
    first, same = ranks[0], len({place.cpus for place in ranks}) == 1
    num_cpus = len(cpu_numbers(first.cpus))
    # If no scheduler reports the number of CPUs of the job, a container with few CPUs cannot be distinguished
    # from a CPU binding, so only fewer CPUs than ranks are certainly a mistake.
    least_cpus = first.allotted_cpus or min(len(ranks), first.online_cpus)
    return len(ranks) > 1 and same and num_cpus < least_cpus


def _one_cpu(nodes: dict[str, list[RankPlace]]) -> Iterator[PlacementFinding]:
    limited: list[RankPlace] = []
    for ranks in nodes.values():
        if not _is_bound_to_the_same(ranks):
            limited += [place for place in ranks if _is_limited_to_one_cpu(place, len(ranks))]
    if limited:
        first = limited[0]
        threads = f" with OMP_NUM_THREADS={first.omp_num_threads}" if _omp_threads(first) > 1 else ""
        yield PlacementFinding(
            f"rank {first.rank} on {first.host} has {_cpus(first)} of {_usable_cpus(first)}{threads}: all "
            f"its threads and loader workers share it; give each rank more CPUs: {_BIND}"
            f"{_more_cases(len(limited) - 1)}"
        )


def _is_limited_to_one_cpu(place: RankPlace, num_ranks: int) -> bool:
    if len(cpu_numbers(place.cpus)) != 1:
        return False
    return _omp_threads(place) > 1 or _usable_cpus(place) >= 2 * num_ranks * place.threads_per_core


def _omp_threads(place: RankPlace) -> int:
    first = place.omp_num_threads.split(",")[0].strip()
    return int(first) if first.isascii() and first.isdecimal() and len(first) < 9 else 0


def _usable_cpus(place: RankPlace) -> int:
    return place.allotted_cpus or place.online_cpus


def _far_devices(places: Sequence[RankPlace]) -> Iterator[PlacementFinding]:
    far = [
        place
        for place in places
        if place.device_cpus and not set(cpu_numbers(place.device_cpus)) & set(cpu_numbers(place.cpus))
    ]
    if far:
        first = far[0]
        yield PlacementFinding(
            f"rank {first.rank} on {first.host} runs on {_cpus(first)} (NUMA node {first.numa or '?'}), far "
            f"from its {first.device} ({first.pci}), which is at NUMA node {first.device_numa}; bind it to "
            f"CPUs among {first.device_cpus}, or reverse the order of the bindings"
            f"{_more_cases(len(far) - 1)}"
        )


def _overlapping(nodes: dict[str, list[RankPlace]]) -> Iterator[PlacementFinding]:
    """Yields a finding if ranks have different CPU sets that share a core; equal sets can be intentional."""
    pairs: list[tuple[RankPlace, RankPlace]] = []
    for ranks in nodes.values():
        if len({place.cpus for place in ranks}) == 1:
            continue
        owner: dict[int, RankPlace] = {}
        for place in ranks:
            owners = {owner.setdefault(core, place).rank: owner[core] for core in cpu_numbers(place.cores)}
            others = [other for other in owners.values() if other.cpus != place.cpus]
            pairs += [(other, place) for other in others[:1]]
    if pairs:
        first, second = pairs[0]
        both = cpu_list(set(cpu_numbers(first.cores)) & set(cpu_numbers(second.cores)))
        yield PlacementFinding(
            f"ranks {first.rank} and {second.rank} on {first.host} are bound to CPUs {first.cpus} and "
            f"{second.cpus}, which are on the same physical cores ({both}); bind each rank to its own whole "
            f"cores{_more_cases(len(pairs) - 1)}"
        )


def _mixed_versions(places: Sequence[RankPlace]) -> Iterator[PlacementFinding]:
    for name in dict.fromkeys(name for place in places for name in place.versions):
        hosts: dict[str, dict[str, None]] = defaultdict(dict)
        for place in places:
            hosts[place.versions.get(name, "none")][place.host] = None
        if len(hosts) > 1:
            by_number = sorted(hosts.items(), key=lambda item: -len(item[1]))
            groups = ", ".join(f"{version} on {_some(list(names))}" for version, names in by_number)
            yield PlacementFinding(
                f"{name} differs between nodes: {groups}; load the same environment on all nodes, from a "
                "shared directory"
            )


def _uneven(nodes: dict[str, list[RankPlace]]) -> Iterator[PlacementFinding]:
    hosts: dict[int, list[str]] = defaultdict(list)
    for host, ranks in nodes.items():
        hosts[len(ranks)].append(host)
    if len(hosts) > 1:
        counts = sorted(hosts.items(), key=lambda item: -len(item[1]))
        groups = ", ".join(f"{count} on {_some(names)}" for count, names in counts)
        yield PlacementFinding(
            f"nodes have different numbers of ranks: {groups}; some devices are idle or shared; start the "
            "same number on each node (mpiexec --ppn R, srun --ntasks-per-node=R)"
        )


def summary(places: Sequence[RankPlace]) -> str:
    """Returns one line, such as `8 ranks on 2 nodes, 8 devices, 16 CPUs per rank`."""
    num_nodes = len({place.host for place in places})
    devices = {
        (place.host, place.identity or place.pci or place.rank) for place in places if place.device != "cpu"
    }
    counts = Counter(len(cpu_numbers(place.cpus)) for place in places)
    least, most = min(counts), max(counts)
    cpus = counted(least, "CPU") if least == most else f"{least} to {most} CPUs"
    ranks = f"{counted(len(places), 'rank')} on {counted(num_nodes, 'node')}"
    gpus = f", {counted(len(devices), 'device')}" if devices else ""
    return f"{ranks}{gpus}, {cpus} per rank"


def table(places: Sequence[RankPlace], findings: Sequence[PlacementFinding]) -> str:
    """Returns the rows as aligned columns, followed by the versions and the findings."""
    rows: list[tuple[str, ...]] = [
        ("rank", "host", "local", "device", "PCI", "NUMA", "CPUs", "NUMA of CPUs", "device's name")
    ]
    for place in places:
        numa = "-" if place.device_numa is None else str(place.device_numa)
        cells = (place.device, place.pci, numa, place.cpus, place.numa, place.identity)
        rows.append((str(place.rank), place.host, str(place.local_rank), *(cell or "-" for cell in cells)))
    lines = aligned(rows, num_left=len(rows[0]))
    versions = ", ".join(f"{name} {version}" for name, version in places[0].versions.items())
    lines += ["", f"rank 0: {versions}"]
    lines += [f"{'error' if finding.ends_job else 'warning'}: {finding.text}" for finding in findings]
    return "\n".join([*lines, ""])


def _cpus(place: RankPlace) -> str:
    return f"CPU {place.cpus}" if place.cpus.isdecimal() else f"CPUs {place.cpus}"


def _more_cases(count: int) -> str:
    return f" ({counted(count, 'more case')})" if count else ""


def _some(names: Sequence[str]) -> str:
    """Returns the first names, such as `n1, n2, n3 and 5 more`."""
    shown = ", ".join(names[:_MAX_NAMED])
    return f"{shown} and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else shown
