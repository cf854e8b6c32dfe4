"""The commands with which Slurm reports the limits of queues and the nodes of a machine, and their output:
for `profiles confirm`, and for the share of a node's cores and memory that comes with one GPU.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace

from ddp_hpc.schedulers.device_share import DeviceShare, NodeKind, answer_of, smallest_share
from ddp_hpc.schedulers.machine_facts import MachineFacts, Question, QueueLimits, distinct_kinds, least
from ddp_hpc.schedulers.slurm.check_option_values import time_s
from ddp_hpc.sites.site import Site

Fields = Mapping[str, str]

# sinfo(1): partition (with * if it is the default), nodes, CPUs, memory in MiB and generic resources. With
# --exact, nodes with different numbers are on different lines.
NODES = ("sinfo", "--noheader", "--exact", "--format=%P|%N|%c|%m|%G")
# `gpu:4`, `gpu:a100:4(S:0-1)`, `gpu:3090:2`; other generic resources follow after a comma.
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)(?=[,(]|$)")
_FIELD = re.compile(r"([A-Za-z]+)=(\S*)")
# `slurm 26.05.3`, or `slurm-wlm 22.05.8` on Debian.
_VERSION = re.compile(r"^slurm\S* (\d\d\.\d\d(?:\.\d+)?)", re.MULTILINE)
_QOS_FORMAT = ("Name", "MaxWall", "MaxTRES", "MinTRES", "Flags")
# Not all nodes, because a large machine has thousands of each kind.
_FIRST_NODES = f"""\
set -o pipefail
{shlex.join(NODES)} |
  while IFS="|" read -r _ nodes _; do scontrol show hostnames "$nodes" | sed -n 1p; done |
  sort -u | paste -s -d , | xargs -r scontrol --oneliner show node"""

QUESTIONS = (
    Question(key="version", answers="the version of Slurm", command="sbatch --version"),
    Question(
        key="partitions",
        answers="the limits of the partitions that you can use",
        command="scontrol --oneliner show partition",
    ),
    Question(
        key="qos",
        answers="the limits of each QOS; Slurm without accounting has none",
        command=f"sacctmgr --parsable2 --noheader show qos format={','.join(_QOS_FORMAT)}",
    ),
    Question(
        key="nodes", answers="the kinds of nodes in each partition, and their GPUs", command=shlex.join(NODES)
    ),
    Question(key="node", answers="the cores and the memory of one node of each kind", command=_FIRST_NODES),
)


def read_answers(answers: Mapping[str, str], site: Site) -> MachineFacts:
    """Returns the facts in the answers to `QUESTIONS`, by key. `site` says which queues are compared."""
    partitions = {
        fields["PartitionName"]: fields
        for fields in map(fields_of, answers.get("partitions", "").splitlines())
        if "PartitionName" in fields
    }
    lines = [line.split("|") for line in answers.get("qos", "").splitlines()]
    qos = {
        line[0]: dict(zip(_QOS_FORMAT, line, strict=True)) for line in lines if len(line) == len(_QOS_FORMAT)
    }
    is_qos = site.slurm.queue_option == "qos"
    pairs = {(entry.name, entry.qos) for entry in site.queues if entry.name} | {
        (name, "") for name in partitions
    }
    queues = {
        (name, of): _limits({}, {}, qos[name]) if is_qos else _limits_of(partitions[name], qos, of)
        for name, of in pairs
        if (name in qos if is_qos else name in partitions and (not of or of in qos or not qos))
    }
    name, gpus_of = first_hosts(answers.get("nodes", ""), None if is_qos else site.default_queue)
    kinds = node_kinds(answers.get("node", ""), gpus_of)
    share = smallest_share(kinds, 1, name)
    if share and name in partitions:
        share = within_partition(share, partitions[name], max(gpus_of.values()))
    nodes = distinct_kinds(kinds, with_gpus=not site.node.cpu_only)
    return MachineFacts(
        version=version_in(answers.get("version", "")), queues=queues, nodes=nodes, share=share
    )


def version_in(text: str) -> str:
    """Returns the version in the output of `sbatch --version`; empty if it contains none."""
    match = _VERSION.search(text)
    return match[1] if match else ""


def _limits_of(partition: Fields, qos: Mapping[str, Fields], of_job: str) -> QueueLimits:
    return _limits(partition, qos.get(partition.get("QoS", ""), {}), qos.get(of_job, {}))


def _limits(partition: Fields, of_partition: Fields, of_job: Fields) -> QueueLimits:
    """Returns the limits of jobs in a partition with a QOS of its own, for a QOS of the job.

    The QOS of the partition comes first, unless the flags of the job's QOS say otherwise (resource_limits:
    "the point in this list where the limit is first defined will be used").
    """
    flags = of_job.get("Flags", "").split(",")
    both = [of_job, of_partition] if "OverPartQOS" in flags else [of_partition, of_job]

    def first(name: str, tres: str = "") -> int | None:
        texts = [
            _tres(fields.get(name, "")).get(tres, "") if tres else fields.get(name, "") for fields in both
        ]
        values = (number(text) if tres else time_s(text) for text in texts)
        return next(filter(None, values), None)

    def within(name: str, flag: str, limit: int | None) -> int | None:
        text = partition.get(name, "")
        own = time_s(text) if name == "MaxTime" else number(text) or None
        return limit if flag in flags else least(limit, own)

    return QueueLimits(
        max_walltime_s=within("MaxTime", "PartitionTimeLimit", first("MaxWall")),
        max_nodes=within("MaxNodes", "PartitionMaxNodes", first("MaxTRES", "node")),
        min_nodes=first("MinTRES", "node") or number(partition.get("MinNodes", "")) or None,
        max_devices=first("MaxTRES", "gres/gpu"),
        is_open=partition.get("State", "UP") == "UP",
        is_for_users="gres/gpu" in _tres(partition.get("TRES", "")),
    )


def _tres(text: str) -> dict[str, str]:
    """Returns the numbers of trackable resources, such as `cpu=64,mem=250G,node=1,gres/gpu=4`."""
    return {name: value for name, _, value in (part.partition("=") for part in text.split(","))}


def device_share(partition: str, gpus_per_node: int) -> DeviceShare | None:
    """Returns the share of a GPU in a partition, or in the default partition; None if Slurm does not say.

    It is a GPU's part of the smallest node with enough GPUs, unless the partition has defaults or limits of
    its own (slurm.conf(5): DefCpuPerGPU, DefMemPerGPU, MaxCPUsPerNode, MaxMemPerNode, MaxMemPerCPU).

    Raises:
        RequestError: the nodes of the partition have fewer GPUs than requested.
    """
    name, hosts = first_hosts(answer_of(*NODES), partition)
    gpus_of = {host: gpus for host, gpus in hosts.items() if gpus}
    # Some sites choose the partition by the request, so the default partition may not be the one that counts.
    if not gpus_of or (not partition and max(gpus_of.values()) < gpus_per_node):
        return None
    kinds = node_kinds(answer_of("scontrol", "--oneliner", "show", "node", ",".join(gpus_of)), gpus_of)
    share = smallest_share(kinds, gpus_per_node, f"partition {name}")
    limits = fields_of(answer_of("scontrol", "--oneliner", "show", "partition", name))
    return share and within_partition(share, limits, max(gpus_of.values()))


def first_hosts(text: str, partition: str | None) -> tuple[str, dict[str, int]]:
    """Returns the name of a partition, and the GPUs of the first node of each of its kinds of nodes, from the
    output of `NODES`.

    An empty name is the default partition, and None means all partitions.
    """
    lines = [line.split("|") for line in text.splitlines()]
    rows = [
        (name.rstrip("*"), _first_host(nodes), _num_gpus(resources))
        for name, nodes, _, _, resources in (line for line in lines if len(line) == 5)
        if partition is None or (name.rstrip("*") == partition if partition else name.endswith("*"))
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


def fields_of(line: str) -> dict[str, str]:
    """Returns the fields of a line of `scontrol --oneliner show`, such as `MaxTime=01:00:00`."""
    # An operating system's name and a comment contain blanks, but the fields that are read here do not.
    return dict(_FIELD.findall(line))


def _first_host(nodes: str) -> str:
    """Returns the first of `gpu[01-10,12]`, which is gpu01."""
    first = re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0]
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first)


def _num_gpus(resources: str) -> int:
    return sum(map(int, _GPUS.findall(resources)))


def number(text: str) -> int:
    """Returns a whole number; 0 if the text is not one, such as `UNLIMITED`."""
    return min(int(text), sys.maxsize) if re.fullmatch(r"\d{1,18}", text) else 0
