"""Real generator processes, and a user without root's rights."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import data_gen

REPOSITORY = Path(data_gen.__file__).resolve().parents[1]


@pytest.fixture
def generator(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts `python -m data_gen ARGUMENTS` in an empty folder."""

    def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "data_gen", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    return start


@pytest.fixture
def run_generator(
    generator: Callable[..., subprocess.Popen[str]],
) -> Callable[..., subprocess.CompletedProcess]:
    """Runs it to its end."""

    def run(*arguments: str, **options: object) -> subprocess.CompletedProcess:
        with generator(*arguments, **options) as process:
            stdout, stderr = process.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    return run


@pytest.fixture
def as_nobody() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A block that runs with the rights of `nobody` where the tests are root's, who may do anything."""

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        if os.geteuid() != 0:
            yield
            return
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    return block


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can reach, unlike tmp_path."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
