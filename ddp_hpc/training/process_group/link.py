"""Connects a rank to the store of the ranks. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.connect_ranks import Endpoint
from ddp_hpc.rendezvous.store_comm import StoreComm
from ddp_hpc.training.process_group.config import ProcessGroupConfig
from ddp_hpc.training.process_group.failure_watch import FailureWatch
from ddp_hpc.training.process_group.print_error import print_error


@dataclass(frozen=True)
class Link:
    """This rank's connection to the ranks' store. It exists before the process group is created."""

    endpoint: Endpoint
    comm: StoreComm
    watch: FailureWatch


def connect(
    world: World, endpoint: Endpoint, config: ProcessGroupConfig, finish_writing: Callable[[float], None]
) -> Link:
    """Returns a link to the ranks' store. The caller must start its failure watch.

    `finish_writing` is passed to `FailureWatch`.
    """
    gone = "rank 0 is gone and has not reported an error. Look in its node's log for what killed it"
    watch = FailureWatch(
        endpoint.store, world.rank, lambda election: print_error(election, gone, world), finish_writing
    )
    comm = StoreComm(endpoint.store, world.rank, world.world_size, config.init_timeout_s)
    return Link(endpoint, comm, watch)
