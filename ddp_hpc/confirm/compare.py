"""Compares the facts of a profile with the answers of its machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ddp_hpc.base.units import counted, format_walltime, parse_walltime_s
from ddp_hpc.confirm.answers import Answers, Rank
from ddp_hpc.confirm.checklist import LAUNCHERS, PYTHON, SOFTWARE
from ddp_hpc.discovery.local_mpi import is_hydra, is_open_mpi
from ddp_hpc.discovery.rank_placement import cpu_numbers
from ddp_hpc.schedulers.machine_facts import MachineFacts, QueueLimits
from ddp_hpc.schedulers.registry import scheduler_of_site
from ddp_hpc.sites.profile_tables import Queue
from ddp_hpc.sites.site import Site, queue_entries

CONFIRMED, DIFFERS, NEW, NO_ANSWER = "confirmed", "differs", "new", "no answer"
# A hostile list of queues must not become a table without an end.
_MAX_NEW_QUEUES = 100
# Sites often reserve some of the memory of a node, so a profile may give up to a tenth less.
_LEAST_SHARE = 0.9
# module of Environment Modules reports an error, but its exit code is 0.
_MODULE_ERROR = re.compile(
    r"^.*(?:unable to locate a modulefile|module\(s\) are unknown|^-- exit code).*$", re.I | re.M
)


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One line of the comparison. `change` are lines of TOML for the profile, if it should change."""

    key: str
    profile: str
    machine: str
    verdict: str
    change: tuple[str, ...] = ()


def compare(site: Site, answers: Answers) -> tuple[MachineFacts, list[Fact]]:
    """Returns what the scheduler reports, and the comparison of all facts."""
    seen = scheduler_of_site(site).commands.read_answers(answers.sections, site)
    facts = [
        _version(site, seen.version),
        *_queues(site, seen),
        *_new_queues(site, seen),
        *_nodes(site, seen),
        *_software(site, answers.sections),
        *_launcher(site, answers.sections),
        *_ranks(site, answers.ranks),
    ]
    return seen, facts


def _fact(key: str, profile: object, machine: object, *change: str, agrees: bool | None = None) -> Fact:
    """Returns a fact; `change` applies if the profile differs or lacks the value."""
    told, seen = ("" if value in (None, 0) else str(value) for value in (profile, machine))
    if not seen:
        verdict = NO_ANSWER
    elif not told:
        verdict = NEW
    else:
        verdict = CONFIRMED if (told == seen if agrees is None else agrees) else DIFFERS
    lines = change if verdict in (DIFFERS, NEW) else ()
    return Fact(key=key, profile=told or "-", machine=seen or "-", verdict=verdict, change=lines)


def _version(site: Site, version: str) -> Fact:
    known = scheduler_of_site(site).reader.version_of(site)
    table = f"[{site.scheduler}]"
    agrees = version == known or version.startswith(f"{known}.")
    return _fact(f"{site.scheduler}.version", known, version, table, f'version = "{version}"', agrees=agrees)


def _queues(site: Site, machine: MachineFacts) -> Iterator[Fact]:
    for name, qos in dict.fromkeys((entry.name, entry.qos) for entry in site.queues if entry.name):
        key = f"queues.{name}" + (f".{qos}" if qos else "")
        where = f"[[queues]] {_named(name, qos)}"
        entries, limits = queue_entries(site, name, qos), machine.queues.get((name, qos))
        if not machine.queues:
            yield _fact(key, "listed", "")
        elif limits is None:
            yield _fact(key, "listed", "not listed", f"# Check, then remove: {where}", agrees=False)
        elif not limits.is_open and any(entry.submit for entry in entries):
            yield _fact(key, "open", "closed", f"# {where}", "submit = false", agrees=False)
        else:
            for limit, told, value in _limits(site, entries, limits):
                seen = value.strip('"')
                yield _fact(f"{key}.{limit}", told.strip('"'), seen, f"# {where}", f"{limit} = {value}")


def _named(name: str, qos: str) -> str:
    return f"name = {json.dumps(name)}" + (f", qos = {json.dumps(qos)}" if qos else "")


def _limits(site: Site, entries: Sequence[Queue], seen: QueueLimits) -> Iterator[tuple[str, str, str]]:
    """Yields the name of each limit of a queue, and its values in the profile and on the machine.

    With several entries, the widest limits of all of them are compared.
    """
    known = QueueLimits(
        max_walltime_s=_widest([_seconds(entry.max_walltime) for entry in entries]),
        min_walltime_s=min(_seconds(entry.min_walltime) for entry in entries),
        max_nodes=_widest([entry.max_nodes for entry in entries]),
        min_nodes=min(entry.min_nodes for entry in entries),
        max_devices=_widest([entry.max_devices for entry in entries]),
    )
    if seen.max_nodes is None and seen.max_devices and not known.max_devices and site.node.devices:
        # PBS often limits the GPUs of a job instead of its nodes.
        seen = replace(seen, max_nodes=seen.max_devices // site.node.devices, max_devices=None)
    of_profile, of_machine = _as_toml(known), _as_toml(seen)
    for name in {**of_profile, **of_machine}:
        yield name, of_profile.get(name, ""), of_machine.get(name, "")


def _as_toml(limits: QueueLimits) -> dict[str, str]:
    """Returns the keys of [[queues]] with the limits that are known, as values of TOML."""
    numbers = {
        "min_nodes": limits.min_nodes,
        "max_nodes": limits.max_nodes,
        "max_devices": limits.max_devices,
    }
    walltimes = {"min_walltime": limits.min_walltime_s, "max_walltime": limits.max_walltime_s}
    lines = {
        name: str(number) for name, number in numbers.items() if number and (name, number) != ("min_nodes", 1)
    }
    return lines | {name: f'"{format_walltime(limit)}"' for name, limit in walltimes.items() if limit}


def _seconds(walltime: str) -> int:
    return parse_walltime_s(walltime) if walltime else 0


def _widest(limits: Sequence[int]) -> int:
    """Returns the largest limit; 0, which means unknown, if one is unknown."""
    return max(limits) if all(limits) else 0


def _new_queues(site: Site, machine: MachineFacts) -> Iterator[Fact]:
    known = {entry.name for entry in site.queues}
    offered = {name: limits for (name, qos), limits in machine.queues.items() if not qos and limits.is_open}
    with_devices = {name: limits for name, limits in offered.items() if limits.is_for_users}
    new = [name for name in sorted(with_devices or offered) if name not in known]
    for name in new[:_MAX_NEW_QUEUES]:
        lines = [f"{key} = {value}" for key, value in _as_toml(offered[name]).items()]
        yield _fact(f"queues.{name}", "", "listed", "[[queues]]", _named(name, ""), *lines)


def _nodes(site: Site, machine: MachineFacts) -> Iterator[Fact]:
    node = site.node
    # Where jobs request single GPUs, profiles give the share of a GPU instead of the whole node.
    if not node.cores_per_device:
        yield from _whole_nodes(site, machine)
    share = machine.share
    for name, known, seen in (
        ("cores_per_device", node.cores_per_device, share.cores if share else 0),
        ("memory_mib_per_device", node.memory_mib_per_device, share.memory_mib if share else 0),
    ):
        if known:
            agrees = _LEAST_SHARE * seen <= known <= seen
            yield _fact(f"node.{name}", known, seen, "[node]", f"{name} = {seen}", agrees=agrees)


def _whole_nodes(site: Site, machine: MachineFacts) -> Iterator[Fact]:
    node = site.node
    cores = {kind.cpus // kind.threads_per_core for kind in machine.nodes}
    cpus = {kind.cpus for kind in machine.nodes}
    # The CPUs that a scheduler counts are cores at some sites, and hardware threads at others.
    counts_threads = node.threads > node.cores and node.threads in cores
    yield _one_of(
        "node.cores", node.cores, set() if counts_threads else cpus if node.cores in cpus else cores
    )
    if node.threads and node.threads != node.cores:
        yield _one_of("node.threads", node.threads, cpus)
    gpus = {kind.gpus for kind in machine.nodes if kind.gpus}
    if any(node.devices == 2 * number for number in gpus):
        # Each half of a GPU with two dies or tiles is one device.
        gpus = {2 * number for number in gpus}
    if gpus or node.devices:
        yield _one_of("node.devices", node.devices, gpus)


def _one_of(key: str, known: int, seen: set[int]) -> Fact:
    """Returns a fact about nodes, which can be of several kinds."""
    table, name = key.split(".")
    numbers = " or ".join(map(str, sorted(seen - {0})))
    change = [f"[{table}]", f"{name} = {min(seen)}"] if len(seen) == 1 else []
    return _fact(key, known, numbers, *change, agrees=known in seen)


def _software(site: Site, sections: dict[str, str]) -> Iterator[Fact]:
    if SOFTWARE not in sections:
        yield _fact(SOFTWARE, counted(len(site.software), "line"), "")
        return
    error = _MODULE_ERROR.search(sections[SOFTWARE])
    versions = sections.get(PYTHON, "").strip().splitlines()
    names = [line for line in versions if re.match(r"(?:Python|torch) \d", line)]
    machine = error[0].strip() if error else ", ".join(names) or "no Python"
    told = counted(len(site.software), "line") if site.software else "no modules"
    change = f"# software: correct the line that failed: {machine}"
    yield _fact(SOFTWARE, told, machine, change, agrees=not error and bool(names))


def _launcher(site: Site, sections: dict[str, str]) -> Iterator[Fact]:
    parts = re.split(r"^launcher ", sections.get(LAUNCHERS, ""), flags=re.MULTILINE)[1:]
    versions = {part.split()[0]: part for part in parts if part.split()}
    launcher = "srun" if site.launch.default == "torchrun" and "srun" in versions else site.launch.default
    first_line, _, version = versions.get(launcher, "").partition("\n")
    # A login node can lack the launcher of the compute nodes.
    is_here = len(first_line.split()) > 1
    shown = version.strip().splitlines()
    yield _fact("launch.default", launcher, (shown[0] if shown else "found") if is_here else "", agrees=True)
    if launcher == "mpiexec" and site.launch.dialect != "auto":
        kind = _kind_of_mpiexec(version) if is_here else ""
        yield _fact("launch.dialect", site.launch.dialect, kind, "[launch]", f'dialect = "{kind}"')


def _kind_of_mpiexec(version: str) -> str:
    if is_open_mpi(version):
        return "openmpi"
    if is_hydra(version):
        return "hydra"
    return "pals" if re.search(r"pals|mpiexec version \d", version, re.IGNORECASE) else ""


def _ranks(site: Site, ranks: Sequence[Rank]) -> Iterator[Fact]:
    if not site.node.cpu_only:
        lacks = [
            rank for rank in ranks if rank.num_devices is not None and rank.local_rank >= rank.num_devices
        ]
        known = [rank for rank in ranks if rank.num_devices is not None]
        seen = f"all of {len(known)} ranks see it" if known else ""
        if lacks:
            seen = f"{_called(lacks[0])} sees {counted(lacks[0].num_devices or 0, 'device')}"
        yield _fact("launch (device of LOCAL_RANK)", "visible", seen, *_REPORT, agrees=not lacks)
    if binds := site.launch.cpu_bind:
        yield _binding(binds, ranks)
    if interface := site.fabric.interface:
        without = [rank for rank in ranks if interface not in rank.interfaces]
        others = ", ".join(ranks[0].interfaces) if ranks else ""
        seen = (
            f"{_called(without[0])} has {', '.join(without[0].interfaces) or 'none'}" if without else others
        )
        yield _fact("fabric.interface", interface, seen, "# [fabric]: correct interface", agrees=not without)
    elif not site.fabric.suffix and ranks:
        fast = [name for name in ranks[0].interfaces if name.startswith(("hsn", "ib"))]
        if fast:
            yield _fact("fabric.interface", "", fast[0], "[fabric]", f"interface = {json.dumps(fast[0])}")


_REPORT = (
    "# Report this with the launch line of the job script; a profile selects devices in several places",
)


def _binding(binds: Sequence[str], ranks: Sequence[Rank]) -> Fact:
    sets = [set(cpu_numbers(text)) for text in binds]

    def is_bound(rank: Rank) -> bool:
        own = set(cpu_numbers(rank.cpus))
        if rank.local_rank >= len(sets) or not sets[rank.local_rank] <= own:
            return False
        # A rank can also have the other hardware threads of its cores, but not the cores of another rank.
        return not any(own & other for number, other in enumerate(sets) if number != rank.local_rank)

    others = [rank for rank in ranks if not is_bound(rank)]
    seen = (
        f"{_called(others[0])} has CPUs {others[0].cpus}" if others else "as in the profile" if ranks else ""
    )
    return _fact("launch.cpu_bind", ":".join(binds), seen, "# [launch]: correct cpu_bind", agrees=not others)


def _called(rank: Rank) -> str:
    return f"rank {rank.rank} (local rank {rank.local_rank} of node {rank.node})"
