"""Fixtures that run real generator processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import data_gen

REPOSITORY = Path(data_gen.__file__).resolve().parents[1]


@pytest.fixture
def generator(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts `python -m data_gen ARGUMENTS` in an empty directory."""

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
    """Runs `python -m data_gen ARGUMENTS` and waits until it exits."""

    def run(*arguments: str, **options: object) -> subprocess.CompletedProcess:
        with generator(*arguments, **options) as process:
            stdout, stderr = process.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    return run
