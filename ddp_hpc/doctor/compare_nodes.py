"""Compares the results of a job's nodes: finds common problems, and nodes that differ from the majority."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ddp_hpc.doctor.check_result import STATUSES, Result, one_line
from ddp_hpc.doctor.node_exchange import Place

_NAMES_SHOWN = 5
_NOT_RUN = Result("", "fail", "did not run this check", "run the same command on every node", "not run")


def differences(results: Mapping[str, list[Result]]) -> list[Result]:
    """Returns a result for each check that is not "ok" on most nodes, and for each group of differing nodes.

    Args:
        results: the results of each node by its name, with the first node first.
    """
    by_name = {node: {result.name: result for result in own} for node, own in results.items()}
    names = dict.fromkeys(result.name for own in results.values() for result in own)
    lines: list[Result] = []
    for name in names:
        groups: dict[str, list[str]] = {}
        for node, own in by_name.items():
            groups.setdefault(own.get(name, _NOT_RUN).compared_by, []).append(node)
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


def exchange_result(results: Mapping[int, object], place: Place, directory: str, wait_s: float) -> Result:
    """Returns the result of `shared-folder`; `results` has the nodes that answered, by node rank."""
    silent = [place.label(node) for node in range(1, place.num_nodes) if node not in results]
    file = f"the file that {place.label(0)} wrote to {directory}"
    if not silent:
        return Result("shared-folder", "ok", f"all {place.num_nodes} nodes found {file}")
    return Result(
        "shared-folder",
        "fail",
        f"{_names(silent)} did not respond to {file} within {wait_s:g} s",
        "read their stderr: the directory is not shared (--shared DIR), or doctor did not start there",
    )


def _share(nodes: list[str], num_nodes: int) -> str:
    return f"all {num_nodes} nodes" if len(nodes) == num_nodes else f"{len(nodes)} of {num_nodes} nodes"


def _names(nodes: list[str]) -> str:
    rest = f" and {len(nodes) - _NAMES_SHOWN} more" if len(nodes) > _NAMES_SHOWN else ""
    return ", ".join(nodes[:_NAMES_SHOWN]) + rest
