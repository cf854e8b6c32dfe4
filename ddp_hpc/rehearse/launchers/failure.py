"""Lets a rank or a node of a rehearsal fail (`ddp-hpc rehearse --fail`)."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.process_control import Process, send
from ddp_hpc.base.timeline import TIMELINE, Moment
from ddp_hpc.discovery.node_check_request import NODE_CHECK
from ddp_hpc.rehearse.launchers.fit_to_machine import Limits, runs_guard
from ddp_hpc.rehearse.launchers.rank_processes import processes_of

LATEST_S = 60
DOWN = "down"
_LOOK_S = 0.2
_WHAT = {
    "rank": "the last rank on {node} is killed",
    "hang": "the last rank on {node} is stopped with SIGSTOP",
    "node": "{node} no longer answers, and its ranks are stopped",
}


@dataclass(kw_only=True)
class Failure:
    """The failure of one launch, whose ranks run on `nodes`. Of the launches of a rehearsal that run long
    enough, only the first one fails.
    """

    root: Path
    spool: Path
    limits: Limits
    command: Sequence[str]
    environ: Mapping[str, str]
    nodes: Sequence[str]

    def __post_init__(self) -> None:
        is_beside = self.environ.get(NODE_CHECK) or runs_guard(self.command)
        self._kind = "" if is_beside else self.limits.fail
        self._begin_s, self._look_s = time.monotonic(), 0.0
        self._saved = self._last_saved()
        self._hung: list[Process] = []

    def look(self) -> None:
        """Lets ranks fail if it is time. To be called again and again while the ranks run."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + _LOOK_S
        if self._kind and self._is_due(now_s):
            self._fail()
        # Again and again, because Slurm continues the processes of a step that it ends.
        send(signal.SIGSTOP, self.lost())
        if self._hung:
            send(signal.SIGSTOP, [process for process in self._last_task() if process in self._hung])

    def lost(self) -> list[Process]:
        """Returns the processes of the ranks on nodes that are lost."""
        ranks = [rank for rank, node in enumerate(self.nodes) if down_file(self.root, node).exists()]
        return processes_of(self.spool / f"pid.{rank}" for rank in ranks) if ranks else []

    def _is_due(self, now_s: float) -> bool:
        after_s = self.limits.fail_after_s
        if after_s is None and self._last_saved() != self._saved:
            return True
        return now_s >= self._begin_s + (LATEST_S if after_s is None else after_s)

    def _last_saved(self) -> tuple[int, float]:
        """Returns values that change when a snapshot or a checkpoint is recorded."""
        num_saved, touched_s = 0, 0.0
        with suppress(OSError, KeyError):
            lines = Path(self.environ["DDP_HPC_RUN_DIR"], TIMELINE).read_text(errors="replace")
            num_saved = lines.count(f'"moment": "{Moment.SAVED}"')
        with suppress(OSError, KeyError):
            touched_s = Path(self.environ["DDP_HPC_PROGRESS_FILE"]).stat().st_mtime
        return num_saved, touched_s

    def _last_task(self) -> list[Process]:
        return processes_of([self.spool / f"pid.{len(self.nodes) - 1}"])

    def _fail(self) -> None:
        kind, node = self._kind, self.nodes[-1]
        program = _program(self._last_task())
        if not program:  # it has not started
            return
        self._kind = ""
        try:
            failed_file(self.root).touch(exist_ok=False)
        except FileExistsError:
            return
        sys.stderr.write(f"rehearse: {_WHAT[kind].format(node=node)} (--fail {kind})\n")
        if kind == "node":
            down_file(self.root, node).touch()
        elif kind == "hang":
            self._hung = program
        else:
            send(signal.SIGKILL, program)


def down_file(root: Path, node: str) -> Path:
    """Returns the file that exists while a node is down; its time is the beginning."""
    return root / DOWN / node


def failed_file(root: Path) -> Path:
    """Returns the file that exists as soon as a launch of the rehearsal has failed."""
    return root / "failed"


def _program(task: Sequence[Process]) -> list[Process]:
    """Returns the processes of the program of the last rank of a task of the launcher.

    If torchrun or `ddp-hpc exec` has started the program, these parents are not among them.
    """
    if any(b"torchrun" in word for process in task for word in _words(process.pid, "cmdline")):
        task = [process for process in task if _rank(process.pid) >= 0]
    ranks = {process: _rank(process.pid) for process in task}
    last = max(ranks.values(), default=-1)
    programs = [process for process in task if ranks[process] == last]
    return [process for process in programs if not _is_exec(process.pid)] or programs


def _rank(pid: int) -> int:
    """Returns the RANK with which a process was started; -1 if it has none."""
    for word in _words(pid, "environ"):
        if word.startswith(b"RANK=") and word[5:].isdigit():
            return int(word[5:])
    return -1


def _is_exec(pid: int) -> bool:
    return b"ddp_hpc.exec" in _words(pid, "cmdline")


def _words(pid: int, file: str) -> list[bytes]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")
    return []
