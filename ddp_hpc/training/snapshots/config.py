"""The options of snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.options import DIRECTORY, check_values, option


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """The options for when and where the state of the training is saved.

    Raises:
        RequestError: values contradict each other, or one is out of range.
    """

    enabled: bool = option(
        True,
        "Save snapshots if the program runs in a job; --no-snapshots disables this, for example for a "
        "benchmark.",
        flag="--snapshots",
    )
    directory: Path | None = option(
        None,
        "Save the state of the training in this directory, stop before the walltime ends, and resume from "
        "the newest snapshot.",
        flag="--snapshot-dir",
        argument="folder",
        **DIRECTORY,
        shown_default="$DDP_HPC_RUN_DIR/snapshots in a job script; otherwise, nothing is saved",
    )
    every_steps: int | None = option(
        None,
        "Save a snapshot every N steps.",
        flag="--snapshot-every-steps",
        argument="every_steps",
        above=0,
        metavar="N",
    )
    every_s: float = option(
        600.0,
        "Save a snapshot when this number of seconds has passed since the last one.",
        flag="--snapshot-every-s",
        argument="every_s",
        above=0,
    )
    keep: int = option(3, "Number of snapshots to keep; older ones are deleted.", above=0)

    def __post_init__(self) -> None:
        check_values(self)
        if not self.enabled and (self.directory or self.every_steps):
            raise RequestError(
                "--no-snapshots cannot be combined with other snapshot options. Remove those options."
            )
