"""Which nodes are bad, from the results of their ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.node_check.results import (
    COLLECTIVE,
    RESULTS,
    Problem,
    RankResult,
    Results,
    read_results,
    write_results,
)
from ddp_hpc.node_check.verdict import Verdict, judge

NODES = ("n1", "n2", "n3", "n4")


def results(change: Callable[[RankResult], RankResult | None] = lambda rank: rank) -> Results:
    """The results of four nodes with two ranks and two GPUs each, which `change` changes."""
    ranks = [
        RankResult(rank=number, host=NODES[number // 2], local_size=2, num_devices=2, clock_s=(-0.1, 0.1))
        for number in range(8)
    ]
    return Results(world_size=8, ranks=tuple(filter(None, map(change, ranks))))


def with_problem(kind: str, *hosts: str) -> Results:
    problem = Problem(kind, "it is broken")
    return results(lambda rank: replace(rank, problems=(problem,)) if rank.host in hosts else rank)


def test_nodes_without_problems_are_good() -> None:
    assert judge(results(), NODES) == Verdict()


def test_a_node_is_bad_if_one_of_its_ranks_has_a_problem() -> None:
    assert judge(with_problem("product", "n3"), NODES) == Verdict({"n3": "it is broken"})


def test_nodes_are_named_as_by_the_scheduler() -> None:
    names = [f"{name}.cluster.example" for name in NODES]
    assert judge(with_problem("product", "n3"), names).bad == {"n3.cluster.example": "it is broken"}


def test_a_problem_of_all_nodes_is_not_the_fault_of_a_node() -> None:
    verdict = judge(with_problem("torch", *NODES), NODES)
    assert verdict == Verdict({}, ("it is broken, on 4 of 4 nodes",))


def test_a_problem_of_one_node_counts_beside_one_of_all_nodes() -> None:
    of_all = with_problem("torch", *NODES)
    extra = Problem("memory", "GPU 1 has 9.0 GiB of memory in use by other processes")
    ranks = [
        replace(rank, problems=(*rank.problems, extra)) if rank.rank == 3 else rank for rank in of_all.ranks
    ]
    verdict = judge(replace(of_all, ranks=tuple(ranks)), NODES)
    assert verdict.bad == {"n2": extra.text}
    assert len(verdict.common) == 1


def test_an_all_reduce_that_fails_condemns_no_node() -> None:
    verdict = judge(with_problem(COLLECTIVE, "n1", "n2", "n3"), NODES)
    assert verdict == Verdict({}, ("it is broken, on 3 of 4 nodes",))


def test_a_node_on_which_no_rank_has_started_is_bad() -> None:
    verdict = judge(results(lambda rank: None if rank.host == "n2" else rank), NODES)
    assert verdict == Verdict({"n2": "no rank has started"})


def test_a_node_on_which_a_rank_has_not_started_is_bad() -> None:
    verdict = judge(results(lambda rank: None if rank.rank == 3 else rank), NODES)
    assert verdict == Verdict({"n2": "only 1 of 2 ranks have started"})


def test_if_only_the_first_node_answers_the_network_may_be_the_cause() -> None:
    verdict = judge(results(lambda rank: rank if rank.host == "n1" else None), NODES)
    assert verdict == Verdict({}, ("no rank has started on 3 nodes: n2, n3, n4",))


def test_a_node_that_has_fewer_gpus_than_others_is_bad() -> None:
    verdict = judge(results(lambda rank: replace(rank, num_devices=1) if rank.host == "n4" else rank), NODES)
    assert verdict.bad == {"n4": "1 GPU found, but 2 on other nodes"}
    verdict = judge(results(lambda rank: replace(rank, num_devices=0) if rank.host == "n4" else rank), NODES)
    assert verdict.bad == {"n4": "no GPUs found, but 2 on other nodes"}


def test_more_gpus_than_ranks_do_not_matter() -> None:
    four = results(lambda rank: replace(rank, num_devices=4) if rank.host == "n4" else rank)
    assert judge(four, NODES) == Verdict()


@pytest.mark.parametrize(
    ("bounds_s", "reason"),
    [
        ((4.9, 5.1), "its clock is 4.9 s fast"),
        ((-5.1, -4.9), "its clock is 4.9 s slow"),
        ((1.7, 1.9), None),
        # Its messages took long.
        ((-30.0, 30.0), None),
    ],
)
def test_a_clock_that_differs_from_the_median_by_more_than_2_s_is_wrong(
    bounds_s: tuple[float, float], reason: str | None
) -> None:
    verdict = judge(
        results(lambda rank: replace(rank, clock_s=bounds_s) if rank.host == "n2" else rank), NODES
    )
    assert verdict.bad.get("n2") == reason


def test_if_the_clock_of_rank_0_is_wrong_its_node_is_bad() -> None:
    verdict = judge(
        results(lambda rank: rank if rank.host == "n1" else replace(rank, clock_s=(6.9, 7.1))), NODES
    )
    assert verdict.bad == {"n1": "its clock is 6.9 s slow"}


def test_of_two_nodes_the_clock_of_rank_0_is_right() -> None:
    two = results(lambda rank: replace(rank, clock_s=(8.0, 8.1)) if rank.host == "n2" else rank)
    two = Results(world_size=4, ranks=two.ranks[:4])
    assert judge(two, NODES[:2]).bad == {"n2": "its clock is 8.0 s fast"}


def test_if_the_scheduler_has_other_names_for_the_nodes_none_is_condemned() -> None:
    verdict = judge(with_problem("product", "n3"), ("x1", "x2", "x3", "x4"))
    assert verdict == Verdict(
        {}, ("the ranks report host names that are not nodes of this job: n1, n2, n3, n4",)
    )


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_results(tmp_path) is None
    write_results(tmp_path, with_problem("product", "n3"))
    assert read_results(tmp_path) == with_problem("product", "n3")
    (tmp_path / RESULTS).write_text('{"ranks": [{}]}')
    with pytest.raises(DdpHpcError, match="cannot be read"):
        read_results(tmp_path)
