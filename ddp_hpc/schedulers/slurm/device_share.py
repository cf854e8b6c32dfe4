"""The share of a node's cores and memory that comes with one GPU, as sinfo and scontrol report it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ddp_hpc.schedulers.deadline import ask_once
from ddp_hpc.schedulers.device_share import LIMIT_S, DeviceShare, NodeKind, smallest_share
from ddp_hpc.schedulers.slurm.query_and_cancel import fields_of

# sinfo(1): partition (with * if it is the default), nodes, CPUs, memory in MiB and generic resources. With
# --exact, nodes with different numbers are on different lines.
NODES = ("sinfo", "--noheader", "--exact", "--format=%P|%N|%c|%m|%G")
# `gpu:4`, `gpu:a100:4(S:0-1)`, `gpu:3090:2`; other generic resources follow after a comma.
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)(?=[,(]|$)")


def device_share(partition: str, gpus_per_node: int) -> DeviceShare | None:
    """Returns the share of a GPU in a partition, or in the default partition; None if Slurm does not say.

    It is a GPU's part of the smallest node with enough GPUs, unless the partition has defaults or limits of
    its own (slurm.conf(5): DefCpuPerGPU, DefMemPerGPU, MaxCPUsPerNode, MaxMemPerNode, MaxMemPerCPU).

    Raises:
        RequestError: the nodes of the partition have fewer GPUs than requested.
    """
    ask = partial(ask_once, limit_s=LIMIT_S)
    name, hosts = first_hosts(ask(*NODES), partition)
    gpus_of = {host: gpus for host, gpus in hosts.items() if gpus}
    # Some sites choose the partition by the request, so the default partition may not be the one that counts.
    if not gpus_of or (not partition and max(gpus_of.values()) < gpus_per_node):
        return None
    kinds = node_kinds(ask("scontrol", "--oneliner", "show", "node", ",".join(gpus_of)), gpus_of)
    share = smallest_share(kinds, gpus_per_node, f"partition {name}")
    limits = fields_of(ask("scontrol", "--oneliner", "show", "partition", name))
    return share and within_partition(share, limits, max(gpus_of.values()))


def first_hosts(text: str, partition: str) -> tuple[str, dict[str, int]]:
    """Returns the name of a partition, and the GPUs of the first node of each of its kinds of nodes, from the
    output of `NODES`.

    An empty name is the default partition.
    """
    lines = [line.split("|") for line in text.splitlines()]
    rows = [
        (name.rstrip("*"), _first_host(nodes), _num_gpus(resources))
        for name, nodes, _, _, resources in (line for line in lines if len(line) == 5)
        if (name.rstrip("*") == partition if partition else name.endswith("*"))
    ]
    return (rows[0][0] if rows else ""), {host: gpus for _, host, gpus in rows}


def node_kinds(text: str, gpus_of: Mapping[str, int]) -> list[NodeKind]:
    """Returns the nodes in `gpus_of` from the output of `scontrol --oneliner show node`."""
    nodes = map(fields_of, text.splitlines())
    return [_kind(fields, gpus_of) for fields in nodes if fields.get("NodeName") in gpus_of]


def _kind(fields: dict[str, str], gpus_of: Mapping[str, int]) -> NodeKind:
    return NodeKind(
        name=fields["NodeName"],
        gpus=gpus_of[fields["NodeName"]],
        # Without the cores that are reserved for the system (CoreSpecCount).
        cpus=number(fields.get("CPUEfctv", "")) or number(fields.get("CPUTot", "")),
        threads_per_core=number(fields.get("ThreadsPerCore", "")) or 1,
        memory_mib=number(fields.get("RealMemory", "")) - number(fields.get("MemSpecLimit", "")),
    )


def within_partition(share: DeviceShare, partition: Mapping[str, str], gpus_of_node: int) -> DeviceShare:
    """Returns the share with the defaults and the limits of a partition."""
    defaults = dict(re.findall(r"(Def\w+)=(\d+)", partition.get("JobDefaults", "")))
    threads = number(defaults.get("DefCpuPerGPU", "")) or share.threads
    if most := number(partition.get("MaxCPUsPerNode", "")):
        threads = min(threads, most // gpus_of_node)
    memory_mib = number(defaults.get("DefMemPerGPU", "")) or share.memory_mib
    if most := number(partition.get("MaxMemPerNode", "")):
        memory_mib = min(memory_mib, most // gpus_of_node)
    if most := number(partition.get("MaxMemPerCPU", "")):
        memory_mib = min(memory_mib, most * threads)
    threads_per_core = max(1, share.threads // max(1, share.cores))
    return replace(share, cores=threads // threads_per_core, threads=threads, memory_mib=memory_mib)


def _first_host(nodes: str) -> str:
    """Returns the first of `gpu[01-10,12]`, which is gpu01."""
    first = re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0]
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first)


def _num_gpus(resources: str) -> int:
    return sum(map(int, _GPUS.findall(resources)))


def number(text: str) -> int:
    """Returns a whole number; 0 if the text is not one, such as `UNLIMITED`."""
    return min(int(text), sys.maxsize) if re.fullmatch(r"\d{1,18}", text) else 0
