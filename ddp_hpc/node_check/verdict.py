"""Which nodes are bad, from the results of all ranks. These are pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddp_hpc.base.units import counted
from ddp_hpc.node_check.results import COLLECTIVE, EARLIER, Problem, RankResult, Results

_CLOCK_S = 2.0
_ABSENT, _DEVICES, _CLOCK = "absent", "devices", "clock"


@dataclass(frozen=True)
class Verdict:
    """The bad nodes, each with the reason, and problems that are not the fault of single nodes.

    `is_complete` is whether all ranks have taken part, and have ended all processes of earlier starts.
    """

    bad: Mapping[str, str] = field(default_factory=dict)
    common: tuple[str, ...] = ()
    is_complete: bool = field(default=False, compare=False)


def judge(results: Results, nodes: Sequence[str]) -> Verdict:
    """Returns the verdict on the nodes, which have the scheduler's names."""
    of_node = {name: [rank for rank in results.ranks if rank.host == short(name)] for name in nodes}
    hosts = {rank.host for rank in results.ranks}
    if strangers := sorted(hosts - {*map(short, nodes)}):
        text = f"the ranks report host names that are not nodes of this job: {', '.join(strangers)}"
        return Verdict(common=(text,), is_complete=_is_complete(results))
    absent = [name for name, ranks in of_node.items() if not ranks]
    problems = {name: [each for rank in ranks for each in rank.problems] for name, ranks in of_node.items()}
    common = []
    if len(nodes) > 2 and len(absent) == len(nodes) - 1:
        common.append(f"no rank has started on {counted(len(absent), 'node')}: {', '.join(absent)}")
    else:
        for name in absent:
            problems[name].append(Problem(_ABSENT, "no rank has started"))
    _add_missing_ranks(problems, of_node, results)
    _add_missing_devices(problems, of_node)
    _add_wrong_clocks(problems, of_node)
    for kind in dict.fromkeys(each.kind for found in problems.values() for each in found):
        first = [next((each for each in found if each.kind == kind), None) for found in problems.values()]
        texts = [each.text for each in first if each is not None]
        if kind == COLLECTIVE or len(texts) == len(nodes):
            common.append(f"{texts[0]}, on {len(texts)} of {counted(len(nodes), 'node')}")
            problems = {
                name: [each for each in found if each.kind != kind] for name, found in problems.items()
            }
    bad = {name: found[0].text for name, found in problems.items() if found}
    return Verdict(bad, tuple(common), _is_complete(results))


def _is_complete(results: Results) -> bool:
    problems = [each for rank in results.ranks for each in rank.problems]
    return len(results.ranks) == results.world_size and not any(each.kind == EARLIER for each in problems)


def short(name: str) -> str:
    """Returns the host name of a node, without its domain."""
    return name.partition(".")[0]


def _add_missing_ranks(
    problems: Mapping[str, list[Problem]], of_node: Mapping[str, Sequence[RankResult]], results: Results
) -> None:
    if len(results.ranks) == results.world_size:
        return
    for name, ranks in of_node.items():
        if ranks and len(ranks) < ranks[0].local_size:
            text = f"only {len(ranks)} of {counted(ranks[0].local_size, 'rank')} have started"
            problems[name].append(Problem(_ABSENT, text))


def _add_missing_devices(
    problems: Mapping[str, list[Problem]], of_node: Mapping[str, Sequence[RankResult]]
) -> None:
    """Compares the numbers of GPUs that the ranks can use; a scheduler may show each rank only its own."""
    usable = {
        name: min(min(rank.num_devices, rank.local_size) for rank in ranks if rank.num_devices is not None)
        for name, ranks in of_node.items()
        if any(rank.num_devices is not None for rank in ranks)
    }
    most = max(usable.values(), default=0)
    for name, number in usable.items():
        if number < most:
            text = f"{number or 'no'} {'GPU' if number == 1 else 'GPUs'} found, but {most} on other nodes"
            problems[name].append(Problem(_DEVICES, text))


def _add_wrong_clocks(
    problems: Mapping[str, list[Problem]], of_node: Mapping[str, Sequence[RankResult]]
) -> None:
    bounds = {
        name: next((rank.clock_s for rank in ranks if rank.clock_s is not None), None)
        for name, ranks in of_node.items()
    }
    known = {name: bound for name, bound in bounds.items() if bound is not None}
    if not known:
        return
    middles = [sum(bound) / 2 for bound in known.values()]
    # Of two nodes, the one of rank 0 counts as right.
    median = min(statistics.median_low(middles), statistics.median_high(middles), key=abs)
    for name, (least, most) in known.items():
        if least > median + _CLOCK_S:
            problems[name].append(Problem(_CLOCK, f"its clock is {least - median:.1f} s fast"))
        elif most < median - _CLOCK_S:
            problems[name].append(Problem(_CLOCK, f"its clock is {median - most:.1f} s slow"))
