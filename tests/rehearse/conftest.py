"""Rehearsals as a user starts them, with a check for remaining processes and files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_hpc.base.process_control import processes
from tests.conftest import Ended, Launch

Rehearse = Callable[..., Ended]


@pytest.fixture
def temp() -> Iterator[Path]:
    """The parent of the directories of rehearsals. Its path is short because jobs create sockets in it."""
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield Path(name)


@pytest.fixture
def rehearse(launch: Launch, temp: Path, tmp_path: Path) -> Rehearse:
    """Runs `ddp-hpc rehearse` in tmp_path and makes sure that no process and no file is left."""

    def run(*words: str | Path, timeout_s: float = 60.0) -> Ended:
        done = launch(
            ["python", "-m", "ddp_hpc", "rehearse", *words],
            env={"TMPDIR": str(temp)},
            cwd=tmp_path,
            timeout_s=timeout_s,
        )
        assert leftovers(temp) == []
        return done

    return run


def leftovers(temp: Path) -> list[str]:
    """Directories of rehearsals that were not kept, and processes that use them."""
    found = [str(path) for path in temp.iterdir()]
    for process in processes():
        try:
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if str(temp).encode() in words + environ:
            found.append(f"{process.pid}: {words.decode(errors='replace')}")
    return found


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """Writes a job script: its directives, then its commands."""

    def write(scheduler: str, *lines: str, name: str = "job.sh") -> Path:
        prefix = {"pbs": "#PBS ", "slurm": "#SBATCH ", "": ""}[scheduler]
        text = "#!/bin/bash\n"
        for line in lines:
            text += f"{prefix}{line}\n" if line.startswith("-") else f"{line}\n"
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
