"""Data files written without data_gen, so that reading is not tested only against our own writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from ddp_hpc.base.errors import DataError
from ddp_hpc.data.open_file import open_samples

NUM_SAMPLES = 23


@pytest.fixture
def values() -> dict[str, np.ndarray]:
    """src (23, 2, 5) and tgt (23, 3) of float32, in which all values differ."""
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
    """Returns the one-line error message for a file that is rejected."""

    def refusal(path: Path, **options: object) -> str:
        with pytest.raises(DataError) as caught:
            open_samples(path, **options)
        text = str(caught.value)
        assert "\n" not in text
        assert path.name in text
        assert caught.value.exit_code == 2
        return text

    return refusal
