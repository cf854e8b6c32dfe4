"""The nodes that a scheduler has allocated, or this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LOCAL = "local"


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One job's nodes, or this machine. Numbers are 0 if they are not known.

    If nodes differ, each number is the smallest one.
    """

    scheduler: str
    job_id: str = ""
    num_nodes: int = 1
    tasks_per_node: int = 0
    """Ranks that the job's own options requested."""
    cpus_per_node: int = 0
    gpus_per_node: int = 0

    def __str__(self) -> str:
        """`2 nodes of slurm job 17`, or `this machine`."""
        if self == THIS_MACHINE:
            return "this machine"
        return f"{self.num_nodes} node{'s' * (self.num_nodes > 1)} of {self.scheduler} job {self.job_id}"


THIS_MACHINE = Allocation(scheduler=_LOCAL)


def first_number(text: str) -> int:
    """The number that a text begins with, or 0."""
    match = re.match(r"[0-9]{1,9}(?![0-9])", text)
    return int(match[0]) if match else 0


def smallest_count(text: str) -> int:
    """The smallest number of Slurm's `2(x3),1`; 0 if there is none."""
    return min((first_number(part) for part in text.split(",")), default=0)
