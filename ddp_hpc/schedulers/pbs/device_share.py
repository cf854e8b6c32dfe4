"""The share of a node's cores and memory that comes with one GPU, as pbsnodes reports it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ddp_hpc.schedulers.deadline import ask_once
from ddp_hpc.schedulers.device_share import LIMIT_S, DeviceShare, NodeKind, smallest_share

NODES = ("pbsnodes", "-a", "-F", "json")
# Sizes of PBS are powers of 1024 (pbs_resources.7B): 527951392kb, 512gb.
_SIZE = re.compile(r"(\d{1,15})([kmgt]?)b?", re.IGNORECASE)
_KIB_OF = {"": 1 / 1024, "k": 1, "m": 1024, "g": 1024**2, "t": 1024**3}


def device_share(queue: str, gpus_per_node: int) -> DeviceShare | None:
    """Returns the share of a GPU of the smallest node with enough GPUs; None if PBS does not say.

    Nodes that are assigned to another queue than `queue` do not count.

    Raises:
        RequestError: the nodes have fewer GPUs than requested.
    """
    kinds = node_kinds(ask_once(*NODES, limit_s=LIMIT_S), queue)
    return smallest_share(kinds, gpus_per_node, "this machine")


def table_of(text: str, key: str) -> dict[str, dict[str, Any]]:
    """Returns the table `key` of an answer in JSON, such as `nodes`; empty if the answer has none."""
    try:
        answer = json.loads(text)
        return {name: row for name, row in dict(answer[key]).items() if isinstance(row, dict)}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def node_kinds(text: str, queue: str) -> Iterator[NodeKind]:
    """Yields the nodes that jobs of a queue can use, from the output of `NODES`."""
    for name, node in table_of(text, "nodes").items():
        resources = node.get("resources_available")
        if not isinstance(resources, dict) or not _takes_jobs_of(queue, node.get("queue"), resources):
            continue
        yield NodeKind(
            name=name,
            gpus=number(resources.get("ngpus")),
            cpus=number(resources.get("ncpus")),
            threads_per_core=1,  # PBS does not say whether its CPUs are cores
            memory_mib=_mib(str(resources.get("mem", ""))),
        )


def _takes_jobs_of(queue: str, only_queue: object, resources: dict[str, object]) -> bool:
    """Returns whether a node may belong to the queue: by its attribute, or by the custom resource Qlist."""
    if only_queue is not None:
        return only_queue == queue
    queues = resources.get("Qlist")
    return not queue or queues is None or queue in str(queues).split(",")


def number(value: object) -> int:
    """Returns a whole number; 0 if the value is not one."""
    text = str(value)
    return int(text) if re.fullmatch(r"\d{1,9}", text) else 0


def _mib(text: str) -> int:
    match = _SIZE.fullmatch(text)
    return int(int(match[1]) * _KIB_OF[match[2].lower()] / 1024) if match else 0
