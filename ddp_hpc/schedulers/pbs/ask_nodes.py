"""Asks PBS which share of a node's cores and memory comes with one GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from ddp_hpc.schedulers.device_share import DeviceShare, NodeKind, answer_of, smallest_share

# Sizes of PBS are powers of 1024 (pbs_resources.7B): 527951392kb, 512gb.
_SIZE = re.compile(r"(\d{1,15})([kmgt]?)b?", re.IGNORECASE)
_KIB_OF = {"": 1 / 1024, "k": 1, "m": 1024, "g": 1024**2, "t": 1024**3}


def device_share(queue: str, gpus_per_node: int) -> DeviceShare | None:
    """Returns the share of a GPU of the smallest node with enough GPUs; None if PBS does not say.

    Nodes that are assigned to another queue than `queue` do not count.

    Raises:
        RequestError: the nodes have fewer GPUs than requested.
    """
    try:
        answer = json.loads(answer_of("pbsnodes", "-a", "-F", "json"))
        nodes = dict(answer["nodes"])
    except (ValueError, KeyError, TypeError):
        return None
    return smallest_share(_kinds(nodes, queue), gpus_per_node, "this machine")


def _kinds(nodes: dict[str, dict[str, object]], queue: str) -> Iterator[NodeKind]:
    for name, node in nodes.items():
        resources = node.get("resources_available") if isinstance(node, dict) else None
        if not isinstance(resources, dict) or not _takes_jobs_of(queue, node.get("queue"), resources):
            continue
        yield NodeKind(
            name=name,
            gpus=_number(resources.get("ngpus")),
            cpus=_number(resources.get("ncpus")),
            threads_per_core=1,  # PBS does not say whether its CPUs are cores
            memory_mib=_mib(str(resources.get("mem", ""))),
        )


def _takes_jobs_of(queue: str, only_queue: object, resources: dict[str, object]) -> bool:
    """Returns whether a node may belong to the queue: by its attribute, or by the custom resource Qlist."""
    if only_queue is not None:
        return only_queue == queue
    queues = resources.get("Qlist")
    return not queue or queues is None or queue in str(queues).split(",")


def _number(value: object) -> int:
    text = str(value)
    return int(text) if re.fullmatch(r"\d{1,9}", text) else 0


def _mib(text: str) -> int:
    match = _SIZE.fullmatch(text)
    return int(int(match[1]) * _KIB_OF[match[2].lower()] / 1024) if match else 0
