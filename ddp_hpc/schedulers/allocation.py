"""The nodes on which `ddp-hpc launch` starts ranks: those of a job, or this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddp_hpc.base.units import counted


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes of a job, or this machine. Unknown numbers are 0.

    `tasks_per_node` is the number that the job has requested. If the nodes differ, each field is the minimum
    over all nodes.
    """

    scheduler: str
    job_id: str = ""
    num_nodes: int = 1
    tasks_per_node: int = 0
    cpus_per_node: int = 0
    gpus_per_node: int = 0

    def __str__(self) -> str:
        """Returns `2 nodes of slurm job 17`, or `this machine`."""
        if self == THIS_MACHINE:
            return "this machine"
        return f"{counted(self.num_nodes, 'node')} of {self.scheduler} job {self.job_id}"


THIS_MACHINE = Allocation(scheduler="local")


def first_number(text: str) -> int:
    """Returns the number at the start of a text; 0 if the text does not begin with a number."""
    match = re.match(r"[0-9]{1,9}(?![0-9])", text)
    return int(match[0]) if match else 0


def smallest_count(text: str) -> int:
    """Returns the smallest count in Slurm's notation, such as 1 for `2(x3),1`; 0 for an empty text."""
    return min((first_number(part) for part in text.split(",")), default=0)
