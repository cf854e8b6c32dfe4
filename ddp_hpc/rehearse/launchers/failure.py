"""Lets a rank or a node of a rehearsal fail (`ddp-hpc rehearse --fail`)."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.process_control import Process, send
from ddp_hpc.base.run_state import read_state
from ddp_hpc.base.timeline import TIMELINE, Moment
from ddp_hpc.discovery.node_check_request import NODE_CHECK
from ddp_hpc.rehearse.launchers.fit_to_machine import Limits, runs_guard, runs_trainer
from ddp_hpc.rehearse.launchers.start_ranks import processes_of

DOWN, FAILED = "down", "failed"
"""The directory of the nodes that are down, and the file that exists after the failure."""
_LOOK_S, _LATEST_S = 0.2, 60.0
_WHAT = {
    "rank": "the last rank on {node} is killed",
    "hang": "the last rank on {node} is stopped with SIGSTOP; nothing more happens until the hang timeout",
    "node": "{node} no longer answers, and its ranks are stopped",
}
# A rank of torchrun, or the program of `ddp-hpc exec`, is a child of these commands, and has a RANK.
_STARTERS = re.compile(
    rb"\b(?:torchrun(?:_script\.sh)?|ddp_hpc\.torchrun[.a-z]*|torch\.distributed\.(?:run|launch)"
    rb"|ddp_hpc\.exec|ddp-hpc\0exec)\0"
)
_RANK = re.compile(rb"(?:^|\0)RANK=([0-9]+)\0")
_MAX_STEPS = re.compile(r".* --max-steps[ =]([0-9]+)(?: |$)")
_SAVED = re.compile(rf'"moment": "{Moment.SAVED}", "step": ([0-9]+)')


@dataclass
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
        given = _MAX_STEPS.search(" ".join(self.limits.command(self.command)))
        self._last_step = int(given[1]) if given and runs_trainer(self.command) else sys.maxsize
        self._saved = self._last_saved()
        self._hung: list[Process] = []

    def look(self) -> None:
        """Lets ranks fail if it is time. To be called again and again while the ranks run."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + _LOOK_S
        may_fail = self._kind and not (self.root / FAILED).exists()
        if may_fail and self._is_due(now_s) and not self._is_complete():
            self._fail(_program(self._last_task()))
        # Again and again, because Slurm continues the processes of a step that it ends.
        lost = [rank for rank, node in enumerate(self.nodes) if down_file(self.root, node).exists()]
        if lost:
            send(signal.SIGSTOP, processes_of(self.spool / f"pid.{rank}" for rank in lost))
        if self._hung:
            send(signal.SIGSTOP, [process for process in self._last_task() if process in self._hung])

    def _is_due(self, now_s: float) -> bool:
        after_s = self.limits.fail_after_s
        if after_s is None and self._has_saved():
            return True
        return now_s >= self._begin_s + (_LATEST_S if after_s is None else after_s)

    def _has_saved(self) -> bool:
        return self._last_saved() != self._saved

    def _saved_steps(self) -> list[int]:
        with suppress(OSError, KeyError):
            lines = Path(self.environ["DDP_HPC_RUN_DIR"], TIMELINE).read_text(errors="replace")
            return [int(step) for step in _SAVED.findall(lines)]
        return []

    def _last_saved(self) -> tuple[int, float]:
        """Returns values that change when a snapshot or a checkpoint is recorded."""
        num_saved, touched_s = len(self._saved_steps()), 0.0
        with suppress(OSError, KeyError):
            touched_s = Path(self.environ["DDP_HPC_PROGRESS_FILE"]).stat().st_mtime
        return num_saved, touched_s

    def _is_complete(self) -> bool:
        # The trainer records its last snapshot before it records that the run is complete.
        if max(self._saved_steps(), default=0) >= self._last_step:
            return True
        with suppress(KeyError, DdpHpcError):
            seen = read_state(Path(self.environ["DDP_HPC_RUN_DIR"]))
            return seen is not None and seen.state.is_complete
        return False

    def _last_task(self) -> list[Process]:
        return processes_of([self.spool / f"pid.{len(self.nodes) - 1}"])

    def _fail(self, program: list[Process]) -> None:
        if not program:  # it has not started
            return
        (self.root / FAILED).touch()
        kind, node = self._kind, self.nodes[-1]
        without = "" if self._has_saved() else "; no snapshot or checkpoint was recorded before"
        sys.stderr.write(f"rehearse: {_WHAT[kind].format(node=node)} (--fail {kind}){without}\n")
        if kind == "node":
            down_file(self.root, node).touch()
        elif kind == "hang":
            self._hung = program
        else:
            send(signal.SIGKILL, program)


def down_file(root: Path, node: str) -> Path:
    """Returns the file that exists while a node is down; its time is the beginning."""
    return root / DOWN / node


def _program(task: Sequence[Process]) -> list[Process]:
    """Returns the processes of the last rank of a task, without torchrun and `ddp-hpc exec`."""
    ranks = {}
    for process in task:
        if not _STARTERS.search(_read(process.pid, "cmdline")):
            found = _RANK.search(_read(process.pid, "environ"))
            ranks[process] = int(found[1]) if found else -1
    return [process for process, rank in ranks.items() if rank == max(ranks.values())]


def _read(pid: int, file: str) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_bytes()
    return b""
