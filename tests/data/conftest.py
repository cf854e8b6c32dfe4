"""Data files made by hand, so that reading is not tested against our own writing alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from ddp_hpc.data.formats import open_samples
from ddp_hpc.errors import DataError

NUM_SAMPLES = 23


@pytest.fixture
def values() -> dict[str, np.ndarray]:
    """src (23, 2, 5) and tgt (23, 3) of float32, every value another."""
    numbers = np.arange(NUM_SAMPLES * 13, dtype=np.float32)
    return {
        "src": numbers[: NUM_SAMPLES * 10].reshape(NUM_SAMPLES, 2, 5),
        "tgt": numbers[NUM_SAMPLES * 10 :].reshape(NUM_SAMPLES, 3),
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes arrays in the format of the suffix."""

    def write(suffix: str, arrays: dict[str, np.ndarray], name: str = "file", **options: object) -> Path:
        path = tmp_path / f"{name}{suffix}"
        if suffix == ".pt":
            torch.save({key: torch.from_numpy(np.array(array)) for key, array in arrays.items()}, path)
        elif suffix == ".safetensors":
            save_file({key: np.array(array) for key, array in arrays.items()}, path)
        else:
            with h5py.File(path, "w") as file:
                for key, array in arrays.items():
                    file.create_dataset(key, data=array, **options)
        return path

    return write


@pytest.fixture
def refusal() -> Callable[..., str]:
    """The one line with which a file is refused."""

    def refusal(path: Path, **options: object) -> str:
        with pytest.raises(DataError) as caught:
            open_samples(path, **options)
        text = str(caught.value)
        assert "\n" not in text
        assert path.name in text
        assert caught.value.exit_code == 2
        return text

    return refusal


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
