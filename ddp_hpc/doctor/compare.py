"""What several nodes' results come to: what all of them lack, and who differs from the most of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ddp_hpc.doctor.nodes import Answers, Place
from ddp_hpc.doctor.result import STATUSES, Result, printable

_SKEW_WARN_S = 1.0
_SKEW_FAIL_S = 30.0
_NAMES_SHOWN = 5
_NOT_RUN = Result("", "fail", "did not run this check", "start the same command on every node", "not run")


def differences(results: Mapping[str, list[Result]]) -> list[Result]:
    """One line for each check that is not "ok" on most nodes, and one for each group of nodes that differs.

    Args:
        results: each node's, by its name, the first node first.
    """
    by_name = {node: {r.name: r for r in found} for node, found in results.items()}
    names = dict.fromkeys(r.name for found in results.values() for r in found)
    lines: list[Result] = []
    for name in names:
        groups: dict[str, list[str]] = {}
        for node, found in by_name.items():
            groups.setdefault(found.get(name, _NOT_RUN).compared_by, []).append(node)
        of_group = [(nodes, by_name[nodes[0]].get(name, _NOT_RUN)) for nodes in groups.values()]
        # Of two equal groups the one that is well counts; `max` takes the first node's otherwise.
        most, usual = max(of_group, key=lambda group: (len(group[0]), -STATUSES.index(group[1].status)))
        if usual.status != "ok":
            lines.append(replace(usual, name=name, what=f"{_share(most, len(results))}: {usual.what}"))
        for nodes, odd in of_group:
            if nodes is most:
                continue
            status = odd.status if odd.status != "ok" else "warn"
            what = f"{_names(nodes)}: {odd.what} (elsewhere: {printable(usual.what)[:150]})"
            remedy = odd.remedy or "make the nodes alike, or leave these out"
            lines.append(replace(odd, name=name, status=status, what=what, remedy=remedy))
    return lines


def meeting_results(answers: Answers, place: Place, folder: str, wait_s: float) -> list[Result]:
    """What the meeting itself showed: `shared-folder` and `clock-skew`."""
    silent = [place.label(n) for n in range(1, place.num_nodes) if n not in answers.results]
    first = place.label(0)
    if silent:
        shared = Result(
            "shared-folder",
            "fail",
            f"{_names(silent)} did not answer {first}'s file in {folder} within {wait_s:g} s",
            "read their stderr: the folder is not shared (--shared DIR), or doctor did not start there",
        )
    else:
        shared = Result("shared-folder", "ok", f"all {place.num_nodes} nodes saw {first}'s file in {folder}")
    return [shared, clock_result(answers, place)]


def clock_result(answers: Answers, place: Place) -> Result:
    """How far the nodes' clocks are from the first node's, as far as the exchange proves it."""
    remedy = "tell the site: the time service (NTP) does not keep the clock; logs and deadlines mislead"
    off = {node: _least_offset(*bounds) for node, bounds in answers.clocks.items()}
    bad = {node: off_s for node, off_s in off.items() if abs(off_s) > _SKEW_WARN_S}
    if bad:
        shown = sorted(bad, key=lambda node: -abs(bad[node]))
        what = _names([f"{place.label(node)} {bad[node]:+.1f} s" for node in shown])
        status = "fail" if any(abs(off_s) > _SKEW_FAIL_S for off_s in bad.values()) else "warn"
        return Result("clock-skew", status, f"against {place.label(0)}: {what}", remedy)
    lacking = [place.label(node) for node in answers.results if node not in answers.clocks]
    if lacking:
        return Result("clock-skew", "warn", f"not measured on {_names(lacking)}", "run doctor again")
    if not off:
        return Result(
            "clock-skew", "warn", "not measured: no other node answered", "mend shared-folder first"
        )
    width_s = max(high - low for low, high in answers.clocks.values())
    return Result("clock-skew", "ok", f"none was found (measured to {width_s:.1f} s)")


def _least_offset(low_s: float, high_s: float) -> float:
    """The offset nearest to 0 that the bounds allow."""
    return low_s if low_s > 0 else min(high_s, 0.0)


def _share(nodes: list[str], num_nodes: int) -> str:
    return f"all {num_nodes} nodes" if len(nodes) == num_nodes else f"{len(nodes)} of {num_nodes} nodes"


def _names(nodes: list[str]) -> str:
    more = f" and {len(nodes) - _NAMES_SHOWN} more" if len(nodes) > _NAMES_SHOWN else ""
    return ", ".join(nodes[:_NAMES_SHOWN]) + more
