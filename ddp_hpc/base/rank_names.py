"""How messages name ranks and their nodes."""

from __future__ import annotations

from collections.abc import Iterable

_MAX_NODES, _MAX_RANKS = 4, 8


def name_ranks(ranks: Iterable[tuple[int, str]]) -> str:
    """Lists ranks, each with its node, as in `rank 3 on n2`, or `ranks 4, 5 on n2 and 6, 7 on n3`."""
    nodes: dict[str, list[int]] = {}
    for rank, host in ranks:
        nodes.setdefault(host, []).append(rank)
    parts = []
    for host, numbers in list(nodes.items())[:_MAX_NODES]:
        listed = ", ".join(map(str, numbers[:_MAX_RANKS])) + (", ..." if len(numbers) > _MAX_RANKS else "")
        parts.append(f"{listed} on {host}" if host else listed)
    if len(nodes) > _MAX_NODES:
        parts.append(f"on {len(nodes) - _MAX_NODES} more nodes")
    return f"rank{'s' * (sum(map(len, nodes.values())) > 1)} {' and '.join(parts)}"
