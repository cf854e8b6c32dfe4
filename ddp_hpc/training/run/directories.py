"""The directories in which a run is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.training.config import TrainConfig


@dataclass(frozen=True)
class RunDirectories:
    """The directories from which a run resumes."""

    run: Path
    """The run directory, with the file `state`."""
    snapshots: Path

    @property
    def stacks(self) -> Path:
        """The directory for the stack traces of hanging ranks."""
        return self.run / "stacks"


def find_run_directories(config: TrainConfig, environ: Mapping[str, str]) -> RunDirectories | None:
    """Returns the run directory and the snapshot directory; None if snapshots are not enabled.

    The snapshot directory is `--snapshot-dir`, or else `snapshots` in `DDP_HPC_RUN_DIR`. Snapshots are not
    enabled if neither is set, or with --no-snapshots.
    """
    run = environ.get("DDP_HPC_RUN_DIR", "")
    if not config.snapshots.enabled or (config.snapshots.directory is None and not run):
        return None
    snapshots = config.snapshots.directory or Path(run) / "snapshots"
    return RunDirectories(Path(run) if run else snapshots, snapshots)
