"""How long a run has been silent: without output of any rank, and without a checkpoint (--idle-timeout).

All ranks and the supervisor share one file in the run directory, whose modification time they look at. A rank
with output touches it if no other rank has done so meanwhile, so for each period (`period_s`), a busy run
costs the file system one change, and each rank opens the file once. The clocks of the nodes may differ,
because times are never compared with them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp_hpc.base.atomic_files import partial_file
from ddp_hpc.discovery.python_stacks import Frame

IDLE_TIMEOUT = "DDP_HPC_IDLE_TIMEOUT_S"
_FILE = "activity"
_MAX_PERIOD_S = 30.0
_PARTS, _LEAST_PARTS = 10, 4
# All ranks together open at most so many files per second, so that they do not slow down a parallel file
# system. A rank that looks opens up to four: `activity`, `end` twice, and its report.
_OPENS_PER_S, _OPENS_PER_LOOK = 500, 4
_WRITER = "silence"


def limit_in(environ: Mapping[str, str]) -> float | None:
    """Returns the limit that the supervisor has set, in seconds; None without one."""
    try:
        return float(environ.get(IDLE_TIMEOUT) or 0) or None
    except ValueError:
        return None


def period_s(limit_s: float, world_size: int = 1) -> float:
    """Returns the seconds between two looks of a rank: a tenth of the limit, at most 30 s, but up to a fourth
    of the limit if there are very many ranks.
    """
    period_s = max(min(limit_s / _PARTS, _MAX_PERIOD_S), _OPENS_PER_LOOK * open_period_s(world_size))
    return min(period_s, limit_s / _LEAST_PARTS)


def open_period_s(world_size: int) -> float:
    """Returns the seconds between two moments at which each rank may open a file."""
    return world_size / _OPENS_PER_S


class Silence:
    """The time since the last activity of any rank, as far as this process has watched it.

    A process that was suspended, like its whole job, does not take the time of the suspension for silence.
    Call `look` at least every `period_s`, which depends on `world_size`.
    """

    def __init__(self, run_dir: Path, limit_s: float, world_size: int = 1) -> None:
        self._path, self._longest_s = run_dir / _FILE, 2 * period_s(limit_s, world_size) + 1.0
        self._changed_ns: int | None = None
        self._looked_s = time.monotonic()
        self._silent_s = 0.0

    def look(self, *, is_active: bool) -> float:
        """Returns the silence in seconds; `is_active` is whether this process knows of activity."""
        now_s = time.monotonic()
        watched_s, self._looked_s = min(now_s - self._looked_s, self._longest_s), now_s
        changed_ns = self._modified_ns()
        is_same = changed_ns is not None and changed_ns == self._changed_ns
        if is_active and (is_same or changed_ns is None):
            self._touch()
            changed_ns = self._modified_ns()
        self._changed_ns = changed_ns
        self._silent_s = self._silent_s + watched_s if is_same and not is_active else 0.0
        return self._silent_s

    def _modified_ns(self) -> int | None:
        # NFS asks the server when a file is opened, but can answer stat with an old time.
        try:
            file = os.open(self._path, os.O_RDONLY)
        except OSError:
            return None
        try:
            return os.fstat(file).st_mtime_ns
        finally:
            os.close(file)

    def _touch(self) -> None:
        with suppress(OSError):
            self._path.touch()


@dataclass(frozen=True, kw_only=True)
class SilentRank:
    """What a rank reports during a silence.

    `state` is the letter of its process in /proc, `cpu_share` the CPU time of its processes during the last
    half of the limit as a share of one core, and `same_s` for how long its main thread has been at the same
    lines without waiting for anything but a GPU. `frames` is its stack, innermost line first.
    """

    rank: int
    world_size: int
    host: str
    state: str
    cpu_share: float
    same_s: float
    frames: tuple[Frame, ...]


def stacks_directory(run_dir: Path, attempt: str) -> Path:
    """Returns the directory of the reports; `attempt` is the value of DDP_HPC_THIS_ATTEMPT."""
    return run_dir / "stacks" / f"attempt-{attempt.split()[0]}"


def write_report(directory: Path, report: SilentRank, stacks: str) -> Path | None:
    """Writes the report of a rank and the stacks of its threads; None if the disk is full, for example."""
    path = directory / f"rank-{report.rank}.txt"
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        with partial_file(path, _WRITER) as partial:
            partial.write_text(f"{json.dumps(asdict(report))}\n\n{stacks}", encoding="utf-8")
            partial.replace(path)
        return path
    return None


def read_reports(directory: Path) -> list[SilentRank]:
    """Returns the reports of the ranks that have found the run silent, in the order of ranks."""
    reports = []
    for path in directory.glob("rank-*.txt"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            with path.open(encoding="utf-8", errors="replace") as file:
                values = json.loads(file.readline())
            frames = tuple(Frame(*frame) for frame in values.pop("frames"))
            reports.append(SilentRank(frames=frames, **values))
    return sorted(reports, key=lambda report: report.rank)
