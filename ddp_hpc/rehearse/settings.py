"""Settings of a simulated machine in JSON files, from which its commands and daemons read them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Self


@dataclass(frozen=True, kw_only=True)
class JsonFile:
    """A dataclass that is stored as a JSON file in the directory of a machine."""

    FILE: ClassVar[str] = "settings.json"

    def write(self, root: Path) -> None:
        """Writes the file in the directory `root`."""
        (root / self.FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, root: Path) -> Self:
        """Returns the content of the file in the directory `root`; the defaults if it does not exist."""
        try:
            values = json.loads((root / cls.FILE).read_text())
        except FileNotFoundError:
            return cls()
        return cls(
            **{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        )


@dataclass(frozen=True, kw_only=True)
class Settings(JsonFile):
    """The settings that all schedulers have. The nodes are only names: everything runs on this machine."""

    nodes: tuple[str, ...] = ("node1", "node2")
    first_job: int = 5
    walltime_s: int = 0  # replaces the walltime of all jobs, unless 0
    max_jobs: int = 0  # maximum number of starts, requeues included; further jobs are held
    kill_delay_s: float = 10.0  # time between SIGTERM and SIGKILL
    poll_s: float = 0.05  # interval at which a daemon checks its job
    all_tasks: bool = False  # whether all tasks of a job array run, instead of the first; only for PBS
    keeper_pid: int = 0  # jobs are killed when this process has ended
