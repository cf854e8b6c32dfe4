"""The files that generate() writes, and when it reuses or rejects existing files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tracemalloc
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from data_gen import Recipe, generate, synthetic
from data_gen.recipe import canonical_json, fingerprint
from ddp_hpc import __version__
from ddp_hpc.base.errors import RequestError
from ddp_hpc.data.open_file import open_samples

SMALL = Recipe(num_samples=10, src_shape=(1, 8), tgt_shape=(3, 8))
SUFFIXES = [".h5", ".hdf5", ".pt", ".safetensors"]


def arrays(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".pt":
        entries = torch.load(path, weights_only=True)
        return {name: entries[name].numpy() for name in ("src", "tgt")}
    if path.suffix == ".safetensors":
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in ("src", "tgt")}
    with h5py.File(path) as file:
        return {name: file[name][:] for name in ("src", "tgt")}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_all_formats_contain_the_same_values(tmp_path, suffix):
    result = generate(SMALL, tmp_path / f"file{suffix}")
    reference = arrays(generate(SMALL, tmp_path / "reference.h5").path)
    found = arrays(result.path)
    assert found["src"].shape == (10, 1, 8)
    assert found["tgt"].shape == (10, 3, 8)
    for name in ("src", "tgt"):
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], reference[name])


def test_hdf5_is_contiguous_and_records_its_origin(tmp_path):
    path = generate(Recipe(num_samples=3, seed=5), tmp_path / "file.h5").path
    with h5py.File(path) as file:
        assert file["src"].chunks is None
        assert file["src"].id.get_offset() % 4096 == 0
        assert file.attrs["format_version"] == 1
        assert file.attrs["seed"] == 5
        assert file.attrs["generator"] == f"ddp-hpc data_gen {__version__}"
        assert json.loads(file.attrs["recipe"])["tgt_shape"] == [20, 512]
        assert file.attrs["fingerprint"] == Recipe(num_samples=3, seed=5).fingerprint
        created = date.fromisoformat(file.attrs["created"])
    assert abs(datetime.now(UTC).date() - created) <= timedelta(days=1)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_uniform_values_are_at_least_zero_and_less_than_one(tmp_path, dtype):
    recipe = Recipe(num_samples=4000, src_shape=(64,), tgt_shape=(1,), dtype=dtype)
    values = arrays(generate(recipe, tmp_path / "file.h5").path)["src"]
    assert values.dtype == dtype
    assert values.min() >= 0.0
    assert values.max() < 1.0
    # The tolerance is 6 standard errors, 0.29 / sqrt(256000), of the mean of 256,000 values.
    assert abs(values.astype(np.float64).mean() - 0.5) < 0.0035
    assert len(np.unique(values)) > 2000


def test_learnable_targets_are_a_linear_map_of_src(tmp_path):
    recipe = Recipe(num_samples=400, src_shape=(20,), tgt_shape=(2,), distribution="learnable")
    found = arrays(generate(recipe, tmp_path / "file.h5").path)
    _, residuals, _, _ = np.linalg.lstsq(found["src"], found["tgt"], rcond=None)
    noise = np.sqrt(residuals / 400)
    assert (noise < 0.01).all()
    assert (noise > 0.003).all()
    assert (found["tgt"].std(axis=0) > 0.1).all()


def test_an_equal_file_is_reused_whenever_it_was_created(tmp_path):
    path = tmp_path / "deep" / "er" / "file.h5"
    first = generate(SMALL, path)
    before = path.stat()
    with h5py.File(path, "r+") as file:
        file.attrs["created"] = "1999-12-31T23:59:59+00:00"
    calls: list[int] = []
    second = generate(SMALL, path, progress=lambda done, total: calls.append(done))
    assert (first.reused, second.reused) == (False, True)
    assert second.num_bytes == path.stat().st_size
    assert path.stat().st_ino == before.st_ino
    assert calls == []


def test_memory_does_not_grow_with_the_file(tmp_path):
    recipe = Recipe(num_samples=1500)
    tracemalloc.start()
    generate(recipe, tmp_path / "file.h5")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Three buffers of 2 MiB and the memory of h5py.
    assert peak_bytes < 16 * 2**20 < recipe.num_bytes / 3


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_all_formats_store_bfloat16(tmp_path, suffix):
    recipe = Recipe(num_samples=10, src_shape=(8,), tgt_shape=(3,), dtype="bfloat16")
    path = generate(recipe, tmp_path / f"floats{suffix}").path
    expected = [values.copy() for _, _, values in synthetic.chunks_of(recipe)]
    samples = open_samples(path)
    assert (samples.src.bfloat16, samples.tgt.bfloat16) == (True, True)
    for found, values in zip(samples.read(np.arange(10)), expected, strict=True):
        np.testing.assert_array_equal(found.ravel(), values)
    samples.close()
    assert generate(recipe, path).reused


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_of_another_recipe_is_kept_and_the_difference_is_reported(tmp_path, suffix):
    path = tmp_path / f"file{suffix}"
    generate(SMALL, path)
    before = path.read_bytes()
    with pytest.raises(RequestError) as caught:
        generate(Recipe(num_samples=11, src_shape=(1, 8), tgt_shape=(3, 8), seed=4), path)
    assert "num_samples is 10 instead of 11, seed is 0 instead of 4" in str(caught.value)
    assert "--force" in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "content",
    [b"", b"a thesis", b"\x89HDF\r\n\x1a\n", b"PK\x03\x04", b"\x02" + bytes(7) + b"{}"],
)
def test_a_file_not_written_by_data_gen_is_kept(tmp_path, suffix, content):
    path = tmp_path / f"file{suffix}"
    path.write_bytes(content)
    with pytest.raises(RequestError, match="was not written by data_gen"):
        generate(SMALL, path)
    assert path.read_bytes() == content
    assert not generate(SMALL, path, force=True).reused
    assert arrays(path)["src"].shape == (10, 1, 8)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_truncated_file_is_neither_reused_nor_overwritten(tmp_path, suffix):
    path = tmp_path / f"file{suffix}"
    size = generate(SMALL, path).num_bytes
    content = path.read_bytes()
    for cut in [*range(0, size, size // 7 + 1), size - 1]:
        path.write_bytes(content[:cut])
        with pytest.raises(RequestError, match="damaged"):
            generate(SMALL, path)
        assert path.stat().st_size == cut


def test_a_recipe_that_was_edited_is_detected(tmp_path):
    path = generate(SMALL, tmp_path / "file.h5").path
    with h5py.File(path, "r+") as file:
        file.attrs["recipe"] = file.attrs["recipe"].replace('"seed":0', '"seed":1')
    with pytest.raises(RequestError, match="it has no recipe with a fingerprint that matches"):
        generate(SMALL, path)


@pytest.mark.parametrize("recipe", ["mine", "[[1]]", "null", "[" * 10**5])
def test_a_recipe_that_is_not_an_object_is_rejected(tmp_path, recipe):
    path = generate(SMALL, tmp_path / "file.safetensors").path
    digest = hashlib.sha256(recipe.encode()).hexdigest()
    save_file(arrays(path), path, {"recipe": recipe, "fingerprint": digest})
    with pytest.raises(RequestError, match="it has no recipe with a fingerprint that matches"):
        generate(SMALL, path)


@pytest.mark.parametrize("name", ["file", "file.npz"])
def test_an_unknown_suffix_is_rejected_with_a_list_of_valid_ones(tmp_path, name):
    with pytest.raises(RequestError, match=r"\.h5 \.hdf5 \.pt \.safetensors"):
        generate(SMALL, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_rejected(tmp_path):
    (tmp_path / "data.h5").mkdir()
    with pytest.raises(RequestError, match="is a directory; give the name of a file"):
        generate(SMALL, tmp_path / "data.h5", force=True)
    os.mkfifo(tmp_path / "pipe.h5")
    with pytest.raises(RequestError, match="is not a regular file"):
        generate(SMALL, tmp_path / "pipe.h5", force=True)


def test_a_link_is_followed(tmp_path):
    (tmp_path / "scratch").mkdir()
    link = tmp_path / "file.h5"
    link.symlink_to(tmp_path / "scratch" / "real.h5")
    generate(SMALL, link)
    assert link.is_symlink()
    assert (tmp_path / "scratch" / "real.h5").is_file()
    assert generate(SMALL, link).reused


@pytest.fixture
def at_the_last_moment(monkeypatch):
    """Runs an action when the file is on disk and about to be renamed."""

    def arrange(action):
        link = os.link

        def link_after(*arguments):
            action()
            link(*arguments)

        monkeypatch.setattr(os, "link", link_after)

    return arrange


def test_a_file_that_appears_at_the_last_moment_is_kept(tmp_path, at_the_last_moment):
    path = tmp_path / "file.h5"
    at_the_last_moment(lambda: path.write_bytes(b"a thesis"))
    with pytest.raises(RequestError, match="was not written by data_gen"):
        generate(SMALL, path)
    assert path.read_bytes() == b"a thesis"
    assert list(tmp_path.iterdir()) == [path]


def test_an_equal_file_that_another_process_finished_first_is_used(tmp_path, at_the_last_moment):
    path = tmp_path / "a" / "file.h5"
    other = generate(SMALL, tmp_path / "b" / "file.h5").path
    inode = other.stat().st_ino
    at_the_last_moment(lambda: other.rename(path))
    assert generate(SMALL, path).reused
    assert path.stat().st_ino == inode


def test_a_file_system_without_hard_links_is_supported(tmp_path, monkeypatch):
    def no_links(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    path = generate(SMALL, tmp_path / "file.h5").path
    assert arrays(path)["src"].shape == (10, 1, 8)
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_beginning_of_a_long_recipe_is_quoted(tmp_path):
    recipe = {"\x1b[31m" * 5000: ["\x1b[0m" * 5000], **{str(number): number for number in range(5000)}}
    path = generate(SMALL, tmp_path / "file.safetensors").path
    save_file(arrays(path), path, {"recipe": canonical_json(recipe), "fingerprint": fingerprint(recipe)})
    with pytest.raises(RequestError, match="exists with different contents") as caught:
        generate(SMALL, path)
    assert len(str(caught.value)) < 2500
    assert str(caught.value).isprintable()


def test_unusual_names_are_supported(tmp_path):
    path = tmp_path / "a b'\"$(touch x);\n" / "f.h5"
    assert generate(SMALL, path).path == path
    assert arrays(path)["src"].shape == (10, 1, 8)
