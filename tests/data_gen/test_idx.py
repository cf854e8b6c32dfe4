"""Conversion of MNIST's IDX files, and the errors for invalid ones."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import h5py
import numpy as np
import pytest

from data_gen import convert_idx as convert_idx_module
from data_gen.convert_idx import convert_idx
from ddp_hpc.base.errors import DataError

IMAGES = np.random.default_rng(0).integers(0, 256, (70, 5, 4), np.uint8)
LABELS = (np.arange(70) % 7).astype(np.uint8)


def idx_bytes(values: np.ndarray) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    images.write_bytes(idx_bytes(IMAGES))
    labels.write_bytes(idx_bytes(LABELS))
    return images, labels


def refused(tmp_path: Path, images: Path, labels: Path, **test_set: Path) -> str:
    with pytest.raises(DataError) as caught:
        convert_idx(images, labels, tmp_path / "out" / "out.h5", **test_set)
    assert not (tmp_path / "out").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_images_become_floats_and_labels_integers(tmp_path, files, monkeypatch):
    monkeypatch.setattr(convert_idx_module, "_BLOCK_IMAGES", 15)  # several chunks, the last one smaller
    with h5py.File(convert_idx(*files, tmp_path / "out.h5").path) as file:
        np.testing.assert_array_equal(file["src"][:], IMAGES[:, np.newaxis] / np.float32(255))
        np.testing.assert_array_equal(file["tgt"][:], LABELS)
        assert (file["src"].dtype, file["tgt"].dtype) == (np.float32, np.int64)
        assert file.attrs["num_classes"] == 7
        assert "test" not in file


def test_a_test_set_is_written_to_its_group(tmp_path, files):
    images, labels = tmp_path / "t10k-images", tmp_path / "t10k-labels"
    images.write_bytes(idx_bytes(IMAGES[:9]))
    labels.write_bytes(idx_bytes(np.full(9, 8, np.uint8)))
    result = convert_idx(*files, tmp_path / "out.h5", test_images=images, test_labels=labels)
    with h5py.File(result.path) as file:
        assert file["test/src"].shape == (9, 1, 5, 4)
        assert file["test/tgt"][:].tolist() == [8] * 9
        assert file.attrs["num_classes"] == 9


def test_gzipped_files_give_the_same_result_whatever_their_name(tmp_path, files):
    path = convert_idx(*files, tmp_path / "out.h5").path
    for file in files:
        file.write_bytes(gzip.compress(file.read_bytes()))
    assert convert_idx(*files, path).reused


def test_a_missing_file_is_reported(tmp_path, files):
    assert "no such file: " in refused(tmp_path, tmp_path / "nowhere", files[1])


def test_swapped_images_and_labels_are_detected(tmp_path, files):
    assert "begins with 00000801, but an IDX file of images begins with 00000803" in refused(
        tmp_path, files[1], files[0]
    )


@pytest.mark.parametrize("compress", [False, True])
def test_a_file_truncated_anywhere_is_rejected(tmp_path, files, compress):
    content = idx_bytes(IMAGES)
    content = gzip.compress(content) if compress else content
    for cut in [*range(0, len(content), len(content) // 7), len(content) - 1]:
        files[0].write_bytes(content[:cut])
        assert str(files[0]) in refused(tmp_path, *files)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PNG!" + bytes(100), "begins with 504e4721"),
        (b"\x00\x00\x0d\x03" + bytes(100), "begins with 00000d03"),
        (idx_bytes(IMAGES) + b"x", "has 1417 bytes, but its header describes images of shape (70, 5, 4)"),
        (b"\0\0\x08\x03" + struct.pack(">3I", 70, 0, 4), "describes images of shape (70, 0, 4)"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "has 16 bytes, but its header describes"),
        (gzip.compress(idx_bytes(IMAGES), mtime=0)[:-8] + bytes(8), "CRC check failed"),
    ],
)
def test_a_damaged_file_is_rejected(tmp_path, files, content, message):
    files[0].write_bytes(content)
    assert message in refused(tmp_path, *files)


def test_different_counts_are_rejected(tmp_path, files):
    files[1].write_bytes(idx_bytes(LABELS[:60]))
    assert "has 70 images" in refused(tmp_path, *files)
    assert "has 60 labels" in refused(tmp_path, *files)


def test_an_incomplete_test_set_is_rejected(tmp_path, files):
    assert "both --test-images and --test-labels" in refused(tmp_path, *files, test_images=files[0])


def test_test_images_of_another_size_are_rejected(tmp_path, files):
    other = tmp_path / "other"
    other.write_bytes(idx_bytes(np.zeros((70, 6, 4), np.uint8)))
    message = refused(tmp_path, *files, test_images=other, test_labels=files[1])
    assert "has images of shape (5, 4)" in message
    assert "has (6, 4)" in message
