"""Asks Slurm which share of a node's cores and memory comes with one GPU of a partition."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

from ddp_hpc.schedulers.device_share import DeviceShare, NodeKind, answer_of, smallest_share

# sinfo(1): partition (with * if it is the default), nodes, CPUs, memory in MiB and generic resources. With
# --exact, nodes with different numbers are on different lines.
_NODES = ("sinfo", "--noheader", "--exact", "--format=%P|%N|%c|%m|%G")
# `gpu:4`, `gpu:a100:4(S:0-1)`, `gpu:3090:2`; other generic resources follow after a comma.
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)(?=[,(]|$)")
_FIELD = re.compile(r"([A-Za-z]+)=(\S*)")


def device_share(partition: str, gpus_per_node: int) -> DeviceShare | None:
    """Returns the share of a GPU in a partition, or in the default partition; None if Slurm does not say.

    It is a GPU's part of the smallest node with enough GPUs, unless the partition has defaults or limits of
    its own (slurm.conf(5): DefCpuPerGPU, DefMemPerGPU, MaxCPUsPerNode, MaxMemPerNode, MaxMemPerCPU).

    Raises:
        RequestError: the nodes of the partition have fewer GPUs than requested.
    """
    lines = [line.split("|") for line in answer_of(*_NODES).splitlines()]
    rows = [
        (name.rstrip("*"), _first_host(nodes), _num_gpus(resources))
        for name, nodes, _, _, resources in (line for line in lines if len(line) == 5)
        if (name.rstrip("*") == partition if partition else name.endswith("*"))
    ]
    gpus_of = {host: gpus for _, host, gpus in rows if gpus}
    # Some sites choose the partition by the request, so the default partition may not be the one that counts.
    if not gpus_of or (not partition and max(gpus_of.values()) < gpus_per_node):
        return None
    name = rows[0][0]
    nodes = answer_of("scontrol", "--oneliner", "show", "node", ",".join(gpus_of))
    kinds = [_kind(fields, gpus_of) for fields in map(_fields, nodes.splitlines()) if fields]
    share = smallest_share(kinds, gpus_per_node, f"partition {name}")
    limits = _fields(answer_of("scontrol", "--oneliner", "show", "partition", name))
    return share and _within(share, limits, max(gpus_of.values()))


def _kind(fields: dict[str, str], gpus_of: dict[str, int]) -> NodeKind:
    return NodeKind(
        name=fields.get("NodeName", ""),
        gpus=gpus_of.get(fields.get("NodeName", ""), 0),
        # Without the cores that are reserved for the system (CoreSpecCount).
        cpus=_number(fields.get("CPUEfctv", "")) or _number(fields.get("CPUTot", "")),
        threads_per_core=_number(fields.get("ThreadsPerCore", "")) or 1,
        memory_mib=_number(fields.get("RealMemory", "")) - _number(fields.get("MemSpecLimit", "")),
    )


def _within(share: DeviceShare, partition: dict[str, str], gpus_of_node: int) -> DeviceShare:
    defaults = dict(re.findall(r"(Def\w+)=(\d+)", partition.get("JobDefaults", "")))
    threads = _number(defaults.get("DefCpuPerGPU", "")) or share.threads
    if most := _number(partition.get("MaxCPUsPerNode", "")):
        threads = min(threads, most // gpus_of_node)
    memory_mib = _number(defaults.get("DefMemPerGPU", "")) or share.memory_mib
    if most := _number(partition.get("MaxMemPerNode", "")):
        memory_mib = min(memory_mib, most // gpus_of_node)
    if most := _number(partition.get("MaxMemPerCPU", "")):
        memory_mib = min(memory_mib, most * threads)
    threads_per_core = max(1, share.threads // max(1, share.cores))
    return replace(share, cores=threads // threads_per_core, threads=threads, memory_mib=memory_mib)


def _fields(line: str) -> dict[str, str]:
    # An operating system's name and a comment contain blanks, but the fields that are read here do not.
    return dict(_FIELD.findall(line))


def _first_host(nodes: str) -> str:
    """Returns the first of `gpu[01-10,12]`, which is gpu01."""
    first = re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0]
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first)


def _num_gpus(resources: str) -> int:
    return sum(map(int, _GPUS.findall(resources)))


def _number(text: str) -> int:
    return min(int(text), sys.maxsize) if re.fullmatch(r"\d{1,18}", text) else 0
