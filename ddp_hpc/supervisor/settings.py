"""The options of `python -m ddp_hpc.job`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.request.job import NodeCheck
from ddp_hpc.schedulers.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `python -m ddp_hpc.job`."""

    scheduler: Scheduler
    script: Path
    arguments: tuple[str, ...]
    """The arguments of the script, which another job must pass to it again."""
    run_dir: Path | None
    """None if the run is not resumed by other jobs."""
    walltime_s: float | None
    """The walltime of the directives, which is used if the scheduler does not report one."""
    max_attempts: int
    restarts: int
    """Maximum number of times that a job starts its ranks again after a failure."""
    spare_nodes: int
    """Number of nodes of the job that replace others."""
    min_nodes: int | None
    """The least number of nodes for the ranks; None if it must not change."""
    node_check: NodeCheck
    """What to do before a start with nodes that fail their check."""
    may_submit: bool
    """False if compute nodes cannot submit jobs at this site."""
    local_dir: str
    """The node-local directory for compiled kernels."""
    progress: tuple[str, ...]
    """Patterns of checkpoints. Their modification times show the progress of a program."""
    idle_timeout_s: float | None
    """The ranks hang if nothing happens for this long; None without a limit."""
    signal_name: str
    signal_lead_s: float | None
    """Send `signal_name` to the ranks this long before the deadline, and resume the run afterwards."""
