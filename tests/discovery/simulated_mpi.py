"""A simulated MPI with threads as ranks. A skipped collective call ends in a timeout instead of a hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ddp_hpc.discovery.world import World, discover
from tests.environments import Case, load

_SKIPPED_S = 5.0


class _Room:
    """The values that the threads of one MPI_COMM_WORLD exchange."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)


class StandInMpi:
    """The interface of `MpiComm` for one thread."""

    def __init__(self, room: _Room, rank: int, ranks_per_node: int) -> None:
        self._room, self._ranks_per_node = room, ranks_per_node
        self.rank, self.size = rank, len(room.values)

    def allgather(self, value: Any) -> list[Any]:
        self._room.values[self.rank] = value
        self._room.barrier.wait(_SKIPPED_S)
        values = list(self._room.values)
        self._room.barrier.wait(_SKIPPED_S)
        return values

    def bcast(self, value: Any) -> Any:
        return self.allgather(value)[0]

    def combine(self, value: Any, rule: Callable[[list[Any]], Any]) -> Any:
        return rule(self.allgather(value))

    def barrier(self, what: str) -> None:
        self.allgather(what)

    def node_layout(self) -> tuple[int, int, int, int]:
        nodes = self.allgather(self.rank // self._ranks_per_node)
        node = nodes[self.rank]
        return nodes[: self.rank].count(node), nodes.count(node), node, len(set(nodes))


def mpi_world(size: int, ranks_per_node: int) -> list[StandInMpi]:
    """Returns the ranks of one world that agrees with its launcher."""
    room = _Room(size)
    return [StandInMpi(room, rank, ranks_per_node) for rank in range(size)]


def singletons(size: int) -> list[StandInMpi]:
    """Returns N worlds of one rank, as from an MPI that the launcher did not start."""
    return [mpi_world(1, 1)[0] for _ in range(size)]


def on_all_ranks(work: Callable[[int], Any], size: int) -> list[Any]:
    """Runs work(rank) for all ranks in threads; returns the results, or the exceptions that were raised."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def discover_all(
    environs: Sequence[dict[str, str]], mpis: Sequence[StandInMpi] | None = None, choice: str = "auto"
) -> list[Any]:
    """Returns each rank's world, or its exception. Without `mpis` discovery must not use MPI."""

    def of_rank(rank: int) -> World:
        def load_mpi(family: str, title: str) -> Any:
            assert mpis is not None, f"MPI was asked for under {title}"
            return mpis[rank]

        return discover(environs[rank], choice, load_mpi)

    return on_all_ranks(of_rank, len(environs))


def place(world: World) -> tuple[int, int, int, int]:
    return world.rank, world.world_size, world.local_rank, world.local_size


def environs_of(case: Case, node_file: str = "") -> list[dict[str, str]]:
    """All ranks' environments, with `node_file` for the PBS_NODEFILE of another machine."""
    environs = [load(case.name, rank) for rank in range(case.num_ranks)]
    for environ in environs:
        if "PBS_NODEFILE" in environ:
            environ["PBS_NODEFILE"] = node_file
    return environs
