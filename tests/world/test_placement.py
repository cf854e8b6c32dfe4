"""Threads for a rank, from the cores that it and its neighbours may use."""

import os

import pytest

from ddp_hpc.world.placement import own_cores, threads_per_rank


def test_own_cores_are_those_of_the_affinity_mask() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert own_cores() == [min(before)]
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("own", "of_node", "environ", "launcher", "threads", "why"),
    [
        ([0, 1], [[0, 1], [2, 3]], {}, "hydra", 2, "2 cores"),
        ([0, 1, 2, 3], [[0, 1, 2, 3]] * 2, {}, "hydra", 2, "4 cores shared by 2 ranks"),
        ([0, 1], [[0, 1]] * 8, {}, "hydra", 1, "2 cores shared by 8 ranks"),
        ([0, 1, 2, 3], [[0, 1, 2, 3]], {"OMP_NUM_THREADS": "2"}, "hydra", 2, "OMP_NUM_THREADS"),
        # PBS sets it to the whole chunk's cores, in every rank.
        ([0, 1], [[0, 1], [2, 3]], {"OMP_NUM_THREADS": "64"}, "pals", 2, "2 cores"),
        # torchrun sets it to 1 where nobody had.
        ([0, 1], [[0, 1]], {"OMP_NUM_THREADS": "1"}, "torchrun", 2, "2 cores"),
        ([0, 1], [[0, 1]], {"OMP_NUM_THREADS": "1"}, "slurm", 1, "OMP_NUM_THREADS"),
        ([0, 1], [[0, 1]], {"OMP_NUM_THREADS": "0"}, "slurm", 2, "2 cores"),
        ([0, 1], [[0, 1]], {"OMP_NUM_THREADS": "many"}, "slurm", 2, "2 cores"),
        ([0], [], {}, "slurm", 1, "1 cores"),
    ],
)
def test_threads_are_the_share_of_the_cores(
    own: list[int], of_node: list[list[int]], environ: dict[str, str], launcher: str, threads: int, why: str
) -> None:
    assert threads_per_rank(own, of_node, environ, launcher) == (threads, why)
