"""The nodes that have failed in the jobs of a run: the file `failed_nodes` with lines `NODE UNIX_S REASON`.

The next jobs of the run do not use them, until `ddp-hpc submit --forget-nodes`.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.atomic_files import append_line
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.queue.submission_ledger import read_lines

FAILED_NODES = "failed_nodes"
_LINE = re.compile(r"([A-Za-z0-9_.-]+) ([0-9]{1,12}) (.*)")


@dataclass(frozen=True)
class FailedNode:
    """A node, when it was last seen to fail (Unix time), and why."""

    node: str
    at_s: int
    reason: str


def failed_nodes(run_dir: Path) -> tuple[FailedNode, ...]:
    """Returns the nodes that have failed, each once, the last one at the end. Damaged lines are skipped."""
    found: dict[str, FailedNode] = {}
    for match in map(_LINE.fullmatch, read_lines(run_dir / FAILED_NODES)):
        if match is not None:
            found.pop(match[1], None)
            found[match[1]] = FailedNode(match[1], int(match[2]), match[3])
    return tuple(found.values())


def record_failed_node(run_dir: Path, node: str, reason: str) -> None:
    """Records that a node has failed. Ignores errors: the log of the job has the same line."""
    line = f"{node} {int(time.time())} {' '.join(reason.split())}"
    with suppress(DdpHpcError):
        append_line(run_dir / FAILED_NODES, line.encode("utf-8", "backslashreplace"))


def forget_failed_nodes(run_dir: Path) -> None:
    """Removes the record, so that all nodes are used again.

    Raises:
        DdpHpcError: the file cannot be removed.
    """
    try:
        (run_dir / FAILED_NODES).unlink(missing_ok=True)
    except OSError as error:
        raise DdpHpcError(
            f"{run_dir / FAILED_NODES} cannot be removed ({error.strerror}); check the permissions of the "
            "directory"
        ) from error
