"""What the end of a process needs. Does not import torch, since errors can occur before that."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.discovery.launcher_environment import present_launchers
from ddp_hpc.discovery.world import World
from ddp_hpc.training.health.heartbeat_messages import NOT_BEGUN
from ddp_hpc.training.run.record import RunRecord, record_end

if TYPE_CHECKING:
    from ddp_hpc.training.health.heartbeat import Heartbeat
    from ddp_hpc.training.process_group.failure_watch import FailureWatch


@dataclass
class Parts:
    """The objects that are needed to end a run; None for those that have not been created yet."""

    world: World | None = None
    watch: FailureWatch | None = None
    heartbeat: Heartbeat | None = None
    record: RunRecord | None = None
    finish_writing: Callable[[float, Callable[[], bool]], None] | None = None
    """Waits for the snapshot that is being written; see `RunLifecycle.finish_writing`."""
    run_dir: Path | None = None
    """The directory with the files of the run, such as the tracebacks of failed ranks."""
    in_script: bool = False
    """Whether the process runs a user's script. If it is the only rank, it then ends like any program."""
    has_lost_rank: bool = False
    """Whether the heartbeat has lost a rank."""

    @property
    def is_alone(self) -> bool:
        """Returns whether this process is the only rank, as far as is known."""
        return self.world.world_size == 1 if self.world is not None else not present_launchers(os.environ)

    def step(self) -> int | None:
        """Returns the step that this process is in; None before the first one."""
        step = self.heartbeat.now().step if self.heartbeat is not None else NOT_BEGUN
        return None if step == NOT_BEGUN else step

    def own_end(self, cause: Cause, reason: str) -> AttemptEnd:
        """Returns the end of the attempt for which this rank is to blame."""
        world = self.world
        return AttemptEnd(
            cause=cause,
            exit_code=cause.exit_code,
            reason=reason,
            rank=None if world is None else world.rank,
            host="" if world is None else world.hostname,
            step=self.step(),
        )

    def record_end(self, end: AttemptEnd) -> None:
        """Records that the attempt has ended with an error."""
        if self.record is not None:
            self.record.failed(end)
        else:
            record_end(os.environ, end)

    def is_lost(self) -> bool:
        """Returns whether another rank failed, in which case this rank ends without a message."""
        return self.watch is not None and self.watch.has_failed_rank

    def wait_for_snapshot(self, limit_s: float) -> None:
        """Waits for the snapshot that is being written, at most `limit_s`."""
        if self.finish_writing is not None:
            self.finish_writing(limit_s, self._is_rank_gone)

    def _is_rank_gone(self) -> bool:
        return self.has_lost_rank or (self.heartbeat is not None and bool(self.heartbeat.gone_ranks(0.0)))
