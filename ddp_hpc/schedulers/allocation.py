"""The nodes that a scheduler has allocated, or this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LOCAL = "local"


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes of a job, or this machine. Unknown numbers are 0.

    If the nodes differ, each number is that of the smallest node.
    """

    scheduler: str
    job_id: str = ""
    num_nodes: int = 1
    tasks_per_node: int = 0
    """The number of tasks per node that the job has requested."""
    cpus_per_node: int = 0
    gpus_per_node: int = 0

    def __str__(self) -> str:
        """Returns `2 nodes of slurm job 17`, or `this machine`."""
        if self == THIS_MACHINE:
            return "this machine"
        return f"{self.num_nodes} node{'s' * (self.num_nodes > 1)} of {self.scheduler} job {self.job_id}"


THIS_MACHINE = Allocation(scheduler=_LOCAL)


def first_number(text: str) -> int:
    """Returns the number at the start of a text, or 0."""
    match = re.match(r"[0-9]{1,9}(?![0-9])", text)
    return int(match[0]) if match else 0


def smallest_count(text: str) -> int:
    """Returns the smallest number of Slurm's `2(x3),1`; 0 if there is none."""
    return min((first_number(part) for part in text.split(",")), default=0)
