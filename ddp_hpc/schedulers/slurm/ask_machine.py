"""The commands with which Slurm reports the limits of queues and the nodes of a machine, and their output."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from ddp_hpc.schedulers.device_share import smallest_share
from ddp_hpc.schedulers.machine_facts import MachineFacts, Question, QueueLimits, distinct_kinds, least
from ddp_hpc.schedulers.slurm.ask_nodes import (
    NODES,
    fields_of,
    first_hosts,
    node_kinds,
    number,
    within_partition,
)
from ddp_hpc.schedulers.slurm.check_option_values import time_s
from ddp_hpc.sites.site import Site

Fields = Mapping[str, str]

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
