"""Fixtures of the tests for the login node: a clean environment, and stand-ins for launchers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIRECTIVES = ("#PBS", "#SBATCH")

# Prints the environment of the launched program as `KEY=value` entries that end with NUL. If it stands in for
# the training, it writes the final state of the run as the training does, unless `then` writes one or fails.
RECORDER = """#!/bin/bash
if [[ ${{1:-}} == --version ]]; then echo "{version}"; exit {version_code}; fi
printf '%s\\0' "$@" >"$RECORD"
env -0 >"$RECORD.env"
state=${{DDP_HPC_RUN_DIR:-/nonexistent}}/state
finish() {{ [[ $1 != 0 || $2 != *ddp_hpc.train* || -e $state ]] || echo done 1 >"$state"; }}
[[ ! -d ${{state%/state}} ]] || trap 'finish $? "$*"' EXIT
{then}
"""


def clean_environ(**extra: str) -> dict[str, str]:
    """The environment of a login shell without variables of schedulers or ddp-hpc."""
    bare = {"PATH": "/usr/bin:/bin", "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(ROOT)}
    return {**bare, **extra}


def run_cli(*args: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """Runs `ddp-hpc ARGS` in a separate process."""
    argv = [sys.executable, "-m", "ddp_hpc", *args]
    return subprocess.run(argv, cwd=cwd, env=clean_environ(**environ), capture_output=True, timeout=60)


class Sandbox:
    """A directory in which scripts run with stand-ins first on the PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.work = folder / "work"
        self.record = folder / "record"
        self.bin.mkdir()
        self.work.mkdir()
        self.program("python", f'#!/bin/bash\nexec {sys.executable} "$@"\n')

    def program(self, name: str, text: str, folder: Path | None = None) -> Path:
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def launcher(
        self,
        name: str,
        *,
        version: str = "HYDRA",
        version_code: int = 0,
        then: str = "",
        folder: Path | None = None,
    ) -> Path:
        """A launcher that records its arguments and environment, and then runs the bash code `then`."""
        text = RECORDER.format(version=version, version_code=version_code, then=then)
        return self.program(name, text, folder)

    def environ(self, **extra: str) -> dict[str, str]:
        path = f"{self.bin}:/usr/bin:/bin"
        return clean_environ(**{"PATH": path, "RECORD": str(self.record), **extra})

    def write(self, text: str | bytes, name: str = "job.sh") -> Path:
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape"))
        return path

    def run(self, text: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
        script = self.write(text)
        # Not the login shell of the shebang: /etc/profile of this machine would reset the PATH of the stand-
        # ins.
        return subprocess.run(
            ["bash", script], cwd=self.work, env=self.environ(**environ), capture_output=True, timeout=60
        )

    def words(self) -> list[str]:
        """The arguments of the launcher."""
        return [w.decode("utf-8", "surrogateescape") for w in self.record.read_bytes().split(b"\0")[:-1]]

    def seen(self) -> dict[str, str]:
        """The environment of the launcher."""
        lines = Path(f"{self.record}.env").read_bytes().split(b"\0")[:-1]
        return dict(line.decode("utf-8", "surrogateescape").split("=", 1) for line in lines)


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Settings of the developer for ddp-hpc do not reach the tests."""
    for name in list(os.environ):
        if name.startswith(("DDP_HPC_", "PBS_", "SLURM_", "LSB_", "LS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
