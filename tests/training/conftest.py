"""Fixtures for the tests of the training."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .tiny import DATA, EPOCHS, EVERY_STEP, make_data, make_home


@pytest.fixture
def no_gpu():
    """Skips the test on a machine with a GPU, on which a request for one is valid."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: tests/gpu covers what is expected then")


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """The directory with the data of `tiny`."""
    return make_data(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def home(tmp_path, tiny_data):
    """The directory for the runs of one test."""
    return make_home(tmp_path, tiny_data)


@pytest.fixture(scope="session")
def whole(tmp_path_factory, tiny_data, forks):
    """The directory of an uninterrupted run of 2 ranks."""
    home = make_home(tmp_path_factory.mktemp("whole"), tiny_data)
    forks.run(*DATA, *EVERY_STEP, "--epochs", str(EPOCHS), cwd=home, ranks=2)
    return home


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(argv, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"a file system of 1 MiB needs root and the right to mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
