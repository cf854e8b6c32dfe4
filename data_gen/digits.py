"""Writes the handwritten digits bundled with scikit-learn: 1,797 images of 8 x 8 pixels in 10 classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.formats import Array, Contents
from data_gen.writer import Chunk, GenerateResult, Progress, write_file
from ddp_hpc.base import data_file_layout
from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.pip_extras import install_command

TEST_FRACTION = 0.2
NUM_CLASSES = 10
# sklearn.datasets.load_digits: "each pixel is an integer in the range 0..16".
_MAX_PIXEL = 16.0
_SOURCE = (
    "UCI Optical Recognition of Handwritten Digits, test set (E. Alpaydin, C. Kaynak, 1998), "
    "as bundled with scikit-learn (load_digits)"
)


def write_digits(
    path: Path, *, seed: int = 0, force: bool = False, progress: Progress | None = None
) -> GenerateResult:
    """Writes src (N, 1, 8, 8) float32 in [0, 1] and tgt (N,) int64, with a fifth of each class in `test/`.

    Raises:
        RequestError: scikit-learn is not installed, or `data_gen.generate` would raise it for this output.
        DdpHpcError: writing failed; no partial file is left.
    """
    images, labels = _load()
    train, test = stratified_split(labels, TEST_FRACTION, seed)
    values: dict[str, NDArray[Any]] = {
        data_file_layout.SRC: images[train],
        data_file_layout.TGT: labels[train],
        data_file_layout.TEST_SRC: images[test],
        data_file_layout.TEST_TGT: labels[test],
    }
    contents = Contents(
        arrays=tuple(Array(name, array.shape, array.dtype.name) for name, array in values.items()),
        recipe={
            "kind": "digits",
            "seed": seed,
            "test_fraction": TEST_FRACTION,
            "format_version": data_file_layout.FORMAT_VERSION,
        },
        attributes={
            data_file_layout.ATTR_SEED: seed,
            data_file_layout.ATTR_NUM_CLASSES: NUM_CLASSES,
            data_file_layout.ATTR_SOURCE: _SOURCE,
        },
    )
    chunks: list[Chunk] = [(name, 0, array) for name, array in values.items()]
    return write_file(path, contents, lambda: chunks, force=force, progress=progress)


def stratified_split(
    labels: NDArray[np.int64], test_fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the ascending indices of the training samples and of the test samples.

    The test samples are a random `test_fraction` of each class.
    """
    stream = np.random.Generator(np.random.SFC64(seed))
    is_test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = stream.permutation(np.flatnonzero(labels == label))
        is_test[members[: round(test_fraction * len(members))]] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _load() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RequestError(
            f"cannot import scikit-learn, which provides the digits; run {install_command('digits')}"
        ) from error
    bundled = load_digits()
    images = (bundled.images[:, np.newaxis] / _MAX_PIXEL).astype(np.float32)  # (N, 1, 8, 8)
    return images, bundled.target.astype(np.int64)
