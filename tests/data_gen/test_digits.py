"""The data file of scikit-learn's digits."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from sklearn.datasets import load_digits

from data_gen.digits import stratified_split, write_digits
from ddp_hpc.base.errors import RequestError


def test_the_file_contains_each_image_once(tmp_path):
    bundled = load_digits()
    with h5py.File(write_digits(tmp_path / "digits.h5").path) as file:
        assert file["src"].shape == (1438, 1, 8, 8)
        assert file["test/src"].shape == (359, 1, 8, 8)
        assert (file["src"].dtype, file["tgt"].dtype) == (np.float32, np.int64)
        assert file["src"].chunks is None
        assert file.attrs["num_classes"] == 10
        assert "UCI" in file.attrs["source"]
        images = np.concatenate([file["src"][:, 0], file["test/src"][:, 0]])
        labels = np.concatenate([file["tgt"][:], file["test/tgt"][:]])
    assert (images.min(), images.max()) == (0.0, 1.0)
    found = sorted((label, image.tobytes()) for label, image in zip(labels, images, strict=True))
    expected = sorted(
        (label, (image / 16).astype(np.float32).tobytes())
        for label, image in zip(bundled.target, bundled.images, strict=True)
    )
    assert found == expected


def test_a_fifth_of_each_class_is_in_the_test_split():
    labels = np.array([0] * 50 + [1] * 10 + [2] * 5)
    train, test = stratified_split(labels, 0.2, seed=0)
    assert np.bincount(labels[test]).tolist() == [10, 2, 1]
    assert sorted([*train, *test]) == list(range(65))


def test_the_split_depends_on_the_seed(tmp_path):
    labels = load_digits().target
    splits = [stratified_split(labels, 0.2, seed)[1].tolist() for seed in (0, 0, 1)]
    assert splits[0] == splits[1] != splits[2]


def test_the_file_is_reused_for_the_same_seed_only(tmp_path):
    path = tmp_path / "digits.h5"
    assert not write_digits(path).reused
    assert write_digits(path).reused
    with pytest.raises(RequestError, match="seed is 0 instead of 1"):
        write_digits(path, seed=1)
