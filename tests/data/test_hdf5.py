"""Reading HDF5 files: plain contiguous data through a memory map, all other data with h5py."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from ddp_hpc.base.errors import DataError
from ddp_hpc.data.memory_mapped import ArrayPlace, FileIdentity, check_within
from ddp_hpc.data.open_file import open_samples
from ddp_hpc.data.samples import ArrayInfo

ORDER = np.array([22, 3, 3, 0])


def check_read(path, values, reader):
    samples = open_samples(path)
    assert samples.reader == reader
    src, tgt = samples.read(ORDER)
    np.testing.assert_array_equal(src, values["src"][ORDER])
    np.testing.assert_array_equal(tgt, values["tgt"][ORDER])
    assert src.dtype.isnative
    return samples


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (4, 2)},
        {"chunks": (4, 2), "compression": "lzf", "shuffle": True, "fletcher32": True},
    ],
)
def test_chunks_are_read_by_h5py(tmp_path, values, options):
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("src", data=values["src"], **{**options, "chunks": (4, 2, 5)})
        file.create_dataset("tgt", data=values["tgt"], **options)
    check_read(path, values, "hdf5 chunked")


@pytest.mark.parametrize("chunks", [(1, 1, 1), (8, 2, 4)])
@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
def test_samples_are_read_in_any_order_from_any_chunks(tmp_path, values, chunks, options):
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("src", data=values["src"], chunks=chunks, **options)
        file["tgt"] = values["tgt"]
    samples = open_samples(path)
    stream = np.random.default_rng(0)
    orders = [np.arange(5, 20), np.arange(23), np.array([4]), *(stream.integers(0, 23, 9) for _ in range(20))]
    for indices in orders:
        np.testing.assert_array_equal(samples.read(indices)[0], values["src"][indices])


def test_each_chunk_of_a_batch_is_read_once(tmp_path, values, monkeypatch):
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("src", data=values["src"], chunks=(8, 2, 5), compression="gzip")
        file.create_dataset("tgt", data=values["tgt"], chunks=(23, 3), compression="gzip")
    slices: list[tuple[str, int, int]] = []
    getitem = h5py.Dataset.__getitem__

    def spy(dataset, part):
        slices.append((dataset.name, part.start, part.stop))
        return getitem(dataset, part)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", spy)
    open_samples(path).read(np.array([22, 3, 9, 3, 0, 21]))
    assert slices == [("/src", 0, 4), ("/src", 9, 10), ("/src", 21, 23), ("/tgt", 0, 23)]


def test_the_cache_is_large_enough_for_the_access_pattern(tmp_path, monkeypatch):
    # HDF5's default cache of 1 MiB does not keep larger chunks, so that each sample decompresses its chunk.
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("src", shape=(32, 4096), dtype="f4", chunks=(5, 1000), compression="gzip")
        file["tgt"] = np.arange(32)
    given: list[dict[str, int]] = []
    opened = h5py.File
    monkeypatch.setattr(
        h5py, "File", lambda *names, **options: given.append(options) or opened(*names, **options)
    )
    open_samples(path).read(np.array([5]))
    assert given[-1]["rdcc_nbytes"] == 35 * 5 * 4000
    assert given[-1]["rdcc_nslots"] > 99 * 35


def test_a_lock_that_the_environment_requires_is_explained(write, values, refusal, monkeypatch):
    path = write(".h5", values)

    def locked(*_, **__):
        raise OSError("[Errno 11] Unable to synchronously open file (unable to lock file, errno = 11)")

    monkeypatch.setattr(h5py, "File", locked)
    assert "export HDF5_USE_FILE_LOCKING=FALSE" in refusal(path)


@pytest.mark.parametrize("chunks", [None, (4, 3)])
def test_a_file_that_the_caller_has_opened_too(write, values, chunks):
    path = write(".h5", values)
    with h5py.File(path, "r+") as file:
        del file["tgt"]
        file.create_dataset("tgt", data=values["tgt"], chunks=chunks)
    with h5py.File(path):
        np.testing.assert_array_equal(open_samples(path).read(ORDER)[1], values["tgt"][ORDER])


def test_the_other_byte_order_is_converted_to_native(write, values):
    swapped = {key: array.astype(">f4") for key, array in values.items()}
    samples = check_read(write(".h5", swapped), values, "hdf5 chunked")
    assert samples.src.dtype == np.dtype("float32")


def test_values_in_an_external_raw_file_are_read(tmp_path, values):
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file["tgt"] = values["tgt"]
        src = values["src"]
        outside = [(str(tmp_path / "raw.bin"), 0, src.nbytes)]
        file.create_dataset("src", shape=src.shape, dtype=src.dtype, external=outside)[:] = src
    check_read(path, values, "hdf5 chunked")
    (tmp_path / "raw.bin").unlink()
    with pytest.raises(DataError, match=r"samples of src cannot be read: .*unable to open external"):
        open_samples(path).read(ORDER)


@pytest.mark.parametrize("chunks", [None, (4,)])
def test_a_dataset_behind_a_link_into_another_file(tmp_path, chunks):
    # Its offset refers to the other file, and its name may belong to another dataset in this file.
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file.create_dataset("tgt", data=np.arange(100, 123), chunks=chunks)
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file["tgt"] = np.arange(23)
        file["src"] = h5py.ExternalLink("other.h5", "/tgt")
    samples = open_samples(path)
    assert samples.read(ORDER)[0].tolist() == [122, 103, 103, 100]


def test_a_virtual_dataset_without_its_source_is_rejected(tmp_path, values, write, refusal):
    part = write(".h5", values, name="part")
    path = tmp_path / "file.h5"
    with h5py.File(path, "w", libver="latest") as file:
        for key, array in values.items():
            layout = h5py.VirtualLayout(shape=array.shape, dtype=array.dtype)
            layout[:] = h5py.VirtualSource("part.h5", key, shape=array.shape)
            file.create_virtual_dataset(key, layout)
    check_read(path, values, "hdf5 chunked")
    part.unlink()
    assert "its source file part.h5 is missing" in refusal(path)


def test_float_types_that_numpy_does_not_support_are_converted(tmp_path, values):
    path = tmp_path / "file.h5"
    numbers = (np.arange(23) * 0.5).astype(np.float32)
    bfloat16 = h5py.h5t.IEEE_F32LE.copy()
    bfloat16.set_fields(15, 7, 8, 0, 7)
    bfloat16.set_size(2)
    bfloat16.set_ebias(127)
    with h5py.File(path, "w") as file:
        file["src"] = values["src"]
        tgt = h5py.h5d.create(file.id, b"tgt", bfloat16, h5py.h5s.create_simple((23,)))
        tgt.write(h5py.h5s.ALL, h5py.h5s.ALL, numbers)
    samples = open_samples(path)
    assert samples.reader == "hdf5 chunked"
    np.testing.assert_array_equal(samples.read(ORDER)[1], numbers[ORDER])


def test_number_of_classes(write, values):
    path = write(".h5", values)
    with h5py.File(path, "r+") as file:
        file.attrs["num_classes"] = np.array([10])
    assert open_samples(path).num_classes == 10


@pytest.mark.parametrize("value", [0, 2.5, "ten", [1, 2]])
def test_an_invalid_number_of_classes(write, values, refusal, value):
    path = write(".h5", values)
    with h5py.File(path, "r+") as file:
        file.attrs["num_classes"] = value
    assert "num_classes" in refusal(path)


@pytest.mark.parametrize(
    ("dtype", "word"),
    [
        (h5py.string_dtype(), "object"),
        ("complex64", "complex64"),
        (np.dtype([("a", "f4"), ("b", "i4")]), "a"),
        (np.longdouble, "float128"),
    ],
)
def test_values_that_are_not_numeric(tmp_path, values, refusal, dtype, word):
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file["tgt"] = values["tgt"]
        file.create_dataset("src", shape=(23,), dtype=dtype)
    text = refusal(path)
    assert "a numeric type of torch is required" in text
    assert word in text


def test_a_group_in_place_of_a_dataset(write, values, refusal):
    path = write(".h5", {"tgt": values["tgt"], "src/deep": values["src"]})
    assert "no array 'src'" in refusal(path)
    assert open_samples(path, src_key="src/deep").src.shape == (2, 5)


@pytest.mark.parametrize("link", [h5py.SoftLink("/nowhere"), h5py.ExternalLink("gone.h5", "/src")])
def test_a_dangling_link(write, values, refusal, link):
    path = write(".h5", {"tgt": values["tgt"]})
    with h5py.File(path, "r+") as file:
        file["src"] = link
    assert "no array 'src'" in refusal(path)


def test_an_unrelated_object_named_test_is_ignored(write, values):
    assert open_samples(write(".h5", {**values, "test": values["src"]})).test is None
    assert open_samples(write(".h5", {**values, "test/notes": np.arange(3)})).test is None


def test_a_filter_that_is_not_available(write, values, refusal, monkeypatch, tmp_path):
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file["tgt"] = values["tgt"]
        file.create_dataset("src", data=values["src"], chunks=(4, 2, 5), compression="gzip")
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: False)
    assert "compressed with filter 1 (deflate), which this HDF5 library does not have" in refusal(path)


def test_a_damaged_chunk_is_an_error_when_it_is_read(tmp_path, values):
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file["tgt"] = values["tgt"]
        src = file.create_dataset("src", data=values["src"], chunks=(23, 2, 5), fletcher32=True)
        offset = src.id.get_chunk_info(0).byte_offset
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff\xff\xff")
    samples = open_samples(path)
    with pytest.raises(DataError, match="samples of src cannot be read") as caught:
        samples.read(ORDER)
    assert "\n" not in str(caught.value)


def test_a_map_never_extends_beyond_the_end_of_the_file(tmp_path):
    # check_within is called directly, because HDF5 2.0 rejects such files itself.
    path = tmp_path / "file.h5"
    path.write_bytes(bytes(100))
    info = ArrayInfo("src", 5, (4,), np.dtype("float32"))
    check_within(path, FileIdentity.of(path), ArrayPlace(info, 20))
    with pytest.raises(DataError, match="src ends at byte 101, but the file has 100 bytes"):
        check_within(path, FileIdentity.of(path), ArrayPlace(info, 21))
