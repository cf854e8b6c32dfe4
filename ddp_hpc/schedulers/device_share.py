"""The share of a node's cores and memory that comes with one GPU, as this machine's scheduler reports it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import counted
from ddp_hpc.sites.site import Site

# A script can be rendered without the answer, so a busy scheduler is not waited for.
LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Nodes with the same resources for jobs. `cpus` are hardware threads; numbers are 0 if unknown."""

    name: str
    gpus: int
    cpus: int
    threads_per_core: int
    memory_mib: int


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """The cores, hardware threads and MiB of memory per GPU, or 0. `why` says where they come from."""

    cores: int
    threads: int
    memory_mib: int
    why: str

    def add_to(self, site: Site) -> Site:
        """Returns the site with these shares instead of its own."""
        node = replace(
            site.node,
            cores_per_device=self.cores,
            threads_per_device=self.threads,
            memory_mib_per_device=self.memory_mib,
        )
        return replace(site, node=node)


def smallest_share(kinds: Iterable[NodeKind], gpus_per_node: int, where: str) -> DeviceShare | None:
    """Returns the share that every node with enough GPUs has; None if no node has GPUs.

    Raises:
        RequestError: nodes have GPUs, but fewer than requested.
    """
    with_gpus = [kind for kind in kinds if kind.gpus]
    if not with_gpus:
        return None
    most = max(kind.gpus for kind in with_gpus)
    enough = [kind for kind in with_gpus if kind.gpus >= gpus_per_node]
    if not enough:
        raise RequestError(
            f"{counted(gpus_per_node, 'GPU')} per node were requested, but the nodes of {where} have at most "
            f"{most}. Use --gpus-per-node {most}, or another --queue."
        )
    cores = min(kind.cpus // kind.threads_per_core // kind.gpus for kind in enough)
    threads = min(kind.cpus // kind.gpus for kind in enough)
    memory_mib = min(kind.memory_mib // kind.gpus for kind in enough)
    smallest = min(enough, key=lambda kind: kind.cpus // kind.gpus)
    why = f"node {smallest.name} of {where} has {smallest.gpus} GPUs"
    return DeviceShare(cores=cores, threads=threads, memory_mib=memory_mib, why=why)
