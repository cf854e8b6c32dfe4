"""Compares the results of a job's nodes: finds common problems, and nodes that differ from the majority."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ddp_hpc.doctor.check_result import STATUSES, Result, one_line
from ddp_hpc.doctor.node_exchange import Answers, Place

_SKEW_WARN_S = 1.0
_SKEW_FAIL_S = 30.0
_NAMES_SHOWN = 5
_NOT_RUN = Result("", "fail", "did not run this check", "run the same command on every node", "not run")


def differences(results: Mapping[str, list[Result]]) -> list[Result]:
    """Returns a result for each check that is not "ok" on most nodes, and for each group of differing nodes.

    Args:
        results: the results of each node by its name, with the first node first.
    """
    by_name = {node: {r.name: r for r in found} for node, found in results.items()}
    names = dict.fromkeys(r.name for found in results.values() for r in found)
    lines: list[Result] = []
    for name in names:
        groups: dict[str, list[str]] = {}
        for node, found in by_name.items():
            groups.setdefault(found.get(name, _NOT_RUN).compared_by, []).append(node)
        of_group = [(nodes, by_name[nodes[0]].get(name, _NOT_RUN)) for nodes in groups.values()]
        # If two groups are equally large, the one with the better status counts as the majority; if their
        # statuses are equal too, `max` selects the group that was found first.
        most, usual = max(of_group, key=lambda group: (len(group[0]), -STATUSES.index(group[1].status)))
        if usual.status != "ok":
            lines.append(replace(usual, name=name, what=f"{_share(most, len(results))}: {usual.what}"))
        for nodes, odd in of_group:
            if nodes is most:
                continue
            status = odd.status if odd.status != "ok" else "warn"
            what = f"{_names(nodes)}: {odd.what} (other nodes: {one_line(usual.what)[:150]})"
            remedy = odd.remedy or "make the nodes identical, or exclude these"
            lines.append(replace(odd, name=name, status=status, what=what, remedy=remedy))
    return lines


def exchange_results(answers: Answers, place: Place, directory: str, wait_s: float) -> list[Result]:
    """Returns the results of `shared-folder` and `clock-skew`, which follow from the exchange of files."""
    silent = [place.label(n) for n in range(1, place.num_nodes) if n not in answers.results]
    file = f"the file that {place.label(0)} wrote to {directory}"
    shared = Result("shared-folder", "ok", f"all {place.num_nodes} nodes found {file}")
    if silent:
        shared = Result(
            "shared-folder",
            "fail",
            f"{_names(silent)} did not respond to {file} within {wait_s:g} s",
            "read their stderr: the directory is not shared (--shared DIR), or doctor did not start there",
        )
    return [shared, clock_result(answers, place)]


def clock_result(answers: Answers, place: Place) -> Result:
    """Compares the nodes' clocks with the first node's, as accurately as the exchange of files allows."""
    remedy = "report it to the site (NTP does not work); times in logs and deadlines will be wrong"
    off = {node: _least_offset(*bounds) for node, bounds in answers.clocks.items()}
    bad = sorted((node for node in off if abs(off[node]) > _SKEW_WARN_S), key=lambda node: -abs(off[node]))
    if bad:
        what = _names([f"{place.label(node)} {off[node]:+.1f} s" for node in bad])
        status = "fail" if abs(off[bad[0]]) > _SKEW_FAIL_S else "warn"
        return Result("clock-skew", status, f"relative to {place.label(0)}: {what}", remedy)
    lacking = [place.label(node) for node in answers.results if node not in answers.clocks]
    if lacking:
        return Result("clock-skew", "warn", f"not measured on {_names(lacking)}", "run doctor again")
    if not off:
        return Result("clock-skew", "warn", "not measured: no other node answered", "fix shared-folder first")
    width_s = max(high - low for low, high in answers.clocks.values())
    return Result("clock-skew", "ok", f"none detected (accuracy {width_s:.1f} s)")


def _least_offset(low_s: float, high_s: float) -> float:
    """Returns the clock offset within these bounds that is nearest to 0."""
    return low_s if low_s > 0 else min(high_s, 0.0)


def _share(nodes: list[str], num_nodes: int) -> str:
    return f"all {num_nodes} nodes" if len(nodes) == num_nodes else f"{len(nodes)} of {num_nodes} nodes"


def _names(nodes: list[str]) -> str:
    more = f" and {len(nodes) - _NAMES_SHOWN} more" if len(nodes) > _NAMES_SHOWN else ""
    return ", ".join(nodes[:_NAMES_SHOWN]) + more
