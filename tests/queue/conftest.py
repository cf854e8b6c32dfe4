"""Schedulers' commands as small programs with recorded output, and `ddp-hpc` in this process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_hpc import cli
from ddp_hpc.queue import follow_log as follow
from ddp_hpc.schedulers import run_command as commands
from tests.batch.conftest import nothing_set

__all__ = ["nothing_set"]


@dataclass(frozen=True)
class Done:
    """The result of a `ddp-hpc` command."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


class Programs:
    """A directory on the PATH of a machine without a real scheduler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"

    def program(self, name: str, text: str) -> None:
        """Writes a bash program without a version. Other calls of it are recorded as lines of `calls`."""
        path = self.folder / name
        unknown = "[[ $* != --version ]] || exit 1"
        path.write_text(f'#!/bin/bash\n{unknown}\nprintf "%s\\n" "{name} $*" >>"{self.calls}"\n{text}\n')
        path.chmod(0o755)

    def answers(self, name: str, text: str, *, code: int = 0, err: str = "") -> None:
        """Writes a program that prints the same output for all arguments."""
        (self.folder / f"{name}.out").write_text(text)
        (self.folder / f"{name}.err").write_text(err)
        folder = self.folder
        self.program(name, f'cat "{folder}/{name}.out"; cat "{folder}/{name}.err" >&2; exit {code}')

    def called(self, name: str = "") -> list[str]:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line for line in lines if line.startswith(name)]


@pytest.fixture
def programs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Programs:
    folder = tmp_path_factory.mktemp("bin")
    # /usr/bin may contain real schedulers' commands, so only the programs that the stand-ins need are linked.
    for name in ("bash", "cat", "sleep", "yes", "mkdir", "kill"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    return Programs(folder)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(follow, "READ_INTERVAL_S", 0.01)
    monkeypatch.setattr(follow, "FIRST_QUERY_S", 0.01)
    monkeypatch.setattr(follow, "FILE_DELAY_S", 0.05)


@pytest.fixture(autouse=True)
def python_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts name no Python environment, as if ddp-hpc were installed without one."""
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, from which the user submits."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs `ddp-hpc ARGS` in this process, which is faster than a new one."""

    def run(*args: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["ddp-hpc", *args])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        code = end.value.code
        return Done(code if isinstance(code, int) else 0, captured.out, captured.err)

    yield run
    gc.enable()
