"""The results of a check of nodes: a file that rank 0 writes and the supervisor reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp_hpc.base.atomic_files import write_atomically
from ddp_hpc.base.errors import DdpHpcError

RESULTS, LAUNCH = "results.json", "launch"
"""The results, and the file in which the supervisor writes DDP_HPC_LAUNCH, which each node must be able to
read."""
COLLECTIVE = "all-reduce"
"""The kind of a problem of all ranks together."""
EARLIER = "earlier start"
"""The kind of the problem that a process of an earlier start cannot be ended."""


@dataclass(frozen=True)
class Problem:
    """What is wrong. Problems of the same `kind` on all nodes are not the fault of a node."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank has found.

    `num_devices` is None if the rank has not looked for devices. `clock_s` are bounds of the difference
    between the clock of its node and that of rank 0, in seconds; None if it is not known.
    """

    rank: int
    host: str
    local_size: int
    num_devices: int | None = None
    clock_s: tuple[float, float] | None = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results of the ranks that have started, of `world_size` ranks."""

    world_size: int
    ranks: tuple[RankResult, ...]


def write_results(directory: Path, results: Results) -> None:
    """Writes the results of all ranks.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    write_atomically(directory / RESULTS, json.dumps(asdict(results)).encode(), "node-check", is_private=True)


def read_results(directory: Path) -> Results | None:
    """Returns the results of all ranks; None if there are none.

    Raises:
        DdpHpcError: the file is damaged.
    """
    path = directory / RESULTS
    try:
        content = json.loads(path.read_bytes())
        ranks = tuple(_rank_result(**fields) for fields in content["ranks"])
        return Results(world_size=content["world_size"], ranks=ranks)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DdpHpcError(f"{path} cannot be read") from error


def _rank_result(*, problems: list[dict[str, str]], clock_s: list[float] | None, **fields: int) -> RankResult:
    clock = None if clock_s is None else (clock_s[0], clock_s[1])
    return RankResult(**fields, clock_s=clock, problems=tuple(Problem(**each) for each in problems))  # type: ignore[arg-type]  # the file is written by `write_results`
