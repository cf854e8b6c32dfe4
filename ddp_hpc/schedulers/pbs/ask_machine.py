"""The commands with which PBS reports the limits of queues and the nodes of a machine, and their output."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from ddp_hpc.schedulers.device_share import smallest_share
from ddp_hpc.schedulers.machine_facts import MachineFacts, Question, QueueLimits, distinct_kinds
from ddp_hpc.schedulers.pbs.ask_nodes import NODES, node_kinds, number, table_of
from ddp_hpc.sites.site import Site

Walltime = Callable[[str], int | None]

# `pbs_version = 23.06.06` in OpenPBS; PBS Professional appends its date: 2022.1.1.20220926110806.
_VERSION = re.compile(r"pbs_version = (\d{1,4}(?:\.\d{1,3}(?!\d)){1,2})", re.IGNORECASE)
# The queues of reservations: R123, S123 and M123.
_RESERVATION = re.compile(r"[RSM]\d+")

QUESTIONS = (
    Question(key="version", answers="the version of PBS", command="qstat --version"),
    Question(key="queues", answers="the limits of the queues", command="qstat -Q -f -F json"),
    Question(
        key="nodes", answers="the cores, the memory and the GPUs of the nodes", command=shlex.join(NODES)
    ),
)


def read_answers(answers: Mapping[str, str], site: Site, walltime_s: Walltime) -> MachineFacts:
    """Returns the facts in the answers to `QUESTIONS`, by key. `walltime_s` reads a walltime of PBS."""
    queues = table_of(answers.get("queues", ""), "Queue")
    nodes = answers.get("nodes", "")
    # The nodes of a routing queue name only its destinations.
    kinds = list(node_kinds(nodes, site.default_queue)) or list(node_kinds(nodes, ""))
    version = _VERSION.search(answers.get("version", ""))
    return MachineFacts(
        version=version[1] if version else "",
        queues={(name, ""): _limits(queue, queues, walltime_s, name) for name, queue in queues.items()},
        nodes=distinct_kinds(kinds, with_gpus=not site.node.cpu_only),
        share=smallest_share(kinds, 1, ""),
    )


def _limits(
    queue: Mapping[str, Any], queues: Mapping[str, Mapping[str, Any]], walltime_s: Walltime, name: str
) -> QueueLimits:
    """Returns the limits of a queue: its own, or those of the largest destination of a routing queue."""
    destinations = [
        queues[other] for other in str(queue.get("route_destinations", "")).split(",") if other in queues
    ]

    def limit(table: str, resource: str, read: Callable[[str], int | None]) -> int | None:
        def of(other: Mapping[str, Any]) -> int | None:
            resources = other.get(table)
            return read(str(resources.get(resource, ""))) if isinstance(resources, dict) else None

        if (own := of(queue)) is not None or not destinations:
            return own
        known = [value for value in map(of, destinations) if value is not None]
        choose = max if table == "resources_max" else min
        return choose(known) if len(known) == len(destinations) else None

    def count(text: str) -> int | None:
        return number(text) or None

    is_restricted = any(queue.get(f"acl_{who}_enable") == "True" for who in ("user", "group", "host"))
    no_gpus = limit("resources_max", "ngpus", lambda text: int(text == "0")) == 1
    return QueueLimits(
        max_walltime_s=limit("resources_max", "walltime", walltime_s),
        min_walltime_s=limit("resources_min", "walltime", walltime_s),
        max_nodes=limit("resources_max", "nodect", count),
        min_nodes=limit("resources_min", "nodect", count),
        max_devices=limit("resources_max", "ngpus", count),
        is_open=queue.get("enabled") == "True",
        is_for_users=not (
            is_restricted or no_gpus or queue.get("from_route_only") == "True" or _RESERVATION.fullmatch(name)
        ),
    )
