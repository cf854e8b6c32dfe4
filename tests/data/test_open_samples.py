"""Behavior common to all formats: shapes, reading by number, handles per process, and errors."""

from __future__ import annotations

import multiprocessing
import os

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch

from ddp_hpc.base.errors import DataError
from ddp_hpc.data.open_file import check_matches, open_samples

SUFFIXES = [".h5", ".pt", ".safetensors"]
READERS = {
    ".h5": "hdf5 memory map",
    ".pt": "pt",
    ".safetensors": "safetensors",
}


@pytest.fixture(params=SUFFIXES)
def suffix(request):
    return request.param


def test_an_open_file_reports_its_contents(write, values, suffix):
    samples = open_samples(write(suffix, values))
    assert samples.num_samples == 23
    assert (samples.src.shape, samples.tgt.shape) == ((2, 5), (3,))
    assert samples.src.dtype == samples.tgt.dtype == np.float32
    assert samples.reader == READERS[suffix]
    assert samples.num_classes is None
    assert samples.test is None


@pytest.mark.parametrize("indices", [[], [22, 0, 7], [5, 5, 5, 1], list(range(23))])
def test_samples_are_read_in_the_requested_order(write, values, suffix, indices):
    src, tgt = open_samples(write(suffix, values)).read(np.array(indices, np.int64))
    np.testing.assert_array_equal(src, values["src"][np.array(indices, int)])
    np.testing.assert_array_equal(tgt, values["tgt"][np.array(indices, int)])
    assert src.flags.writeable
    assert src.flags.c_contiguous


@pytest.mark.parametrize("index", [-1, 23])
def test_an_index_out_of_range_is_an_error(write, values, suffix, index):
    with pytest.raises(IndexError):
        open_samples(write(suffix, values)).read(np.array([3, index]))


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16", "bool"])
def test_dtypes_are_preserved(write, values, suffix, dtype):
    cast = {key: (array % 2).astype(dtype) for key, array in values.items()}
    samples = open_samples(write(suffix, cast))
    src, _ = samples.read(np.arange(23))
    assert src.dtype == samples.src.dtype == dtype
    np.testing.assert_array_equal(src, cast["src"])


def test_bfloat16_is_read_as_uint16_bits(tmp_path, suffix):
    path = tmp_path / f"file{suffix}"
    src = torch.tensor([[1.5, -2.0], [0.0078125, 3e38], [0.5, 9.0]], dtype=torch.bfloat16)
    arrays = {"src": src, "tgt": torch.tensor([0, 1, 2])}
    if suffix == ".pt":
        torch.save(arrays, path)
    elif suffix == ".safetensors":
        safetensors.torch.save_file(arrays, path)
    else:
        with h5py.File(path, "w") as file:
            file["src"] = src.view(torch.uint16).numpy()
            file["src"].attrs["dtype"] = "bfloat16"
            file["tgt"] = arrays["tgt"].numpy()
    samples = open_samples(path)
    assert (samples.src.bfloat16, samples.tgt.bfloat16) == (True, False)
    assert samples.src.dtype == np.uint16
    bits, _ = samples.read(np.array([2, 0]))
    assert torch.equal(torch.from_numpy(bits).view(torch.bfloat16), src[[2, 0]])


def test_a_batch_is_read_into_the_given_buffers(write, values, suffix):
    samples = open_samples(write(suffix, values))
    buffers = samples.buffers(4)
    src, tgt = samples.read(np.array([7, 7, 1]), out=buffers)
    assert src.base is buffers[0]
    assert tgt.base is buffers[1]
    np.testing.assert_array_equal(src, values["src"][[7, 7, 1]])
    np.testing.assert_array_equal(tgt, values["tgt"][[7, 7, 1]])


@pytest.mark.parametrize("change", ["cut", "grown"])
def test_a_file_that_changes_while_it_is_read_is_an_error_not_a_crash(write, values, suffix, change):
    path = write(suffix, values)
    samples = open_samples(path)
    samples.read(np.array([22]))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2 if change == "cut" else path.stat().st_size + 1)
    with pytest.raises(DataError, match="changed while it was read") as caught:
        samples.read(np.array([22]))
    assert "\n" not in str(caught.value)


def test_labels_may_be_one_dimensional(write, values, suffix):
    samples = open_samples(write(suffix, {"src": values["src"], "tgt": np.arange(23)}))
    assert samples.tgt.shape == ()
    assert samples.read(np.array([4, 2]))[1].tolist() == [4, 2]


def test_a_test_split_is_read(write, values, suffix):
    both = {**values, "test/src": values["src"][:5] + 0.5, "test/tgt": values["tgt"][:5] + 0.5}
    samples = open_samples(write(suffix, both))
    assert samples.num_samples == 23
    assert samples.test.num_samples == 5
    np.testing.assert_array_equal(samples.test.read(np.array([4]))[0], values["src"][4:5] + 0.5)


def test_other_names_are_read_by_their_keys(write, values, suffix):
    path = write(suffix, {"x": values["src"], "y": values["tgt"]})
    samples = open_samples(path, src_key="x", tgt_key="y")
    np.testing.assert_array_equal(samples.read(np.array([3]))[0], values["src"][3:4])


def test_a_forked_process_reads_through_its_own_handle(write, values, suffix):
    samples = open_samples(write(suffix, values))
    samples.read(np.array([0]))

    def child(connection):
        before = samples._opened
        src, _ = samples.read(np.array([7]))
        connection.send((src.tolist(), samples._opened is before))

    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    src, same_handle = ours.recv()
    process.join(30)
    assert process.exitcode == 0
    assert src == values["src"][7:8].tolist()
    assert not same_handle
    np.testing.assert_array_equal(samples.read(np.array([8]))[0], values["src"][8:9])


def test_a_closed_file_opens_again(write, values, suffix):
    samples = open_samples(write(suffix, values))
    samples.read(np.array([0]))
    samples.close()
    samples.close()
    assert samples.read(np.array([1]))[0].shape == (1, 2, 5)


def test_a_file_that_was_replaced_is_not_read(write, values, suffix):
    path = write(suffix, values)
    samples = open_samples(path)
    write(suffix, values, name="other").replace(path)
    with pytest.raises(DataError, match="was replaced"):
        samples.read(np.array([0]))


def test_a_missing_file_and_its_nearest_name(write, values, suffix, refusal):
    path = write(suffix, values, name="digits")
    text = refusal(path.with_name(f"digit{suffix}"))
    assert f'did you mean "digits{suffix}"' in text
    assert "python -m data_gen" in text


def test_a_directory_is_not_a_file(tmp_path, refusal, suffix):
    path = tmp_path / f"file{suffix}"
    path.mkdir()
    (path / "inner.h5").touch()
    assert "is a directory; a file is required, such as inner.h5" in refusal(path)


def test_a_pipe_is_rejected_without_waiting_for_it(tmp_path, refusal, suffix):
    path = tmp_path / f"file{suffix}"
    os.mkfifo(path)
    assert "is not a regular file" in refusal(path)


def test_a_file_that_may_not_be_read(write, values, suffix, refusal, as_nobody, open_folder):
    path = open_folder / f"file{suffix}"
    path.write_bytes(write(suffix, values).read_bytes())
    open_samples(path)
    path.chmod(0)
    with as_nobody():
        assert "no permission to read" in refusal(path)


@pytest.mark.parametrize("name", ["file", "file.npz"])
def test_an_unknown_suffix(tmp_path, refusal, name):
    (tmp_path / name).touch()
    assert "expected one of .h5 .hdf5 .pt .safetensors" in refusal(tmp_path / name)


def test_a_file_truncated_anywhere(write, values, suffix, refusal):
    path = write(suffix, values)
    content = path.read_bytes()
    for cut in [*range(0, len(content), len(content) // 7), len(content) - 1]:
        path.write_bytes(content[:cut])
        assert "HDF5_USE_FILE_LOCKING" not in refusal(path)


def test_a_missing_dataset_is_reported_with_those_present(write, values, suffix, refusal):
    path = write(suffix, {"scr": values["src"], "tgt": values["tgt"]})
    text = refusal(path)
    assert 'did you mean "scr"' in text
    assert "(found: scr, tgt)" in text
    assert "--src-key" in text
    assert "--tgt-key" in refusal(write(suffix, {"src": values["src"]}))


def test_lengths_that_differ(write, values, suffix, refusal):
    text = refusal(write(suffix, {"src": values["src"], "tgt": values["tgt"][:-1]}))
    assert "src has 23 samples, but tgt has 22" in text


@pytest.mark.parametrize(
    ("src", "message"),
    [
        (np.zeros((0, 5), np.float32), "no samples"),
        (np.zeros((23, 0), np.float32), "its samples are empty"),
        (np.float32(1.0), "a single value"),
    ],
)
def test_arrays_without_samples(write, values, suffix, refusal, src, message):
    assert message in refusal(write(suffix, {"src": src, "tgt": values["tgt"]}))


def test_half_a_test_split(write, values, suffix, refusal):
    text = refusal(write(suffix, {**values, "test/src": values["src"]}))
    assert "test/tgt" in text


def test_a_test_split_of_other_samples(write, values, suffix, refusal):
    other = {"test/src": values["src"][:, :1], "test/tgt": values["tgt"]}
    assert "both splits must have the same" in refusal(write(suffix, {**values, **other}))


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({"src_shape": (1, 512)}, "src have shape 2,5, but --src-shape is 1,512"),
        ({"tgt_shape": ()}, "tgt have shape 3, but --tgt-shape is ()"),
        ({"dtype": "float64"}, "src has dtype float32, but --dtype is float64"),
    ],
)
def test_a_file_that_does_not_match_the_request(write, values, requested, message):
    with pytest.raises(DataError) as caught:
        check_matches(open_samples(write(".h5", values)), **requested)
    check_matches(open_samples(write(".h5", values)), (2, 5), (3,), "float32")
    assert message in str(caught.value)


def test_the_requested_dtype_does_not_apply_to_class_indices(write, values):
    samples = open_samples(write(".h5", {"src": values["src"], "tgt": np.arange(23)}))
    check_matches(samples, dtype="float32")
    mixed = open_samples(write(".h5", {"src": values["src"], "tgt": values["tgt"].astype(np.float64)}))
    with pytest.raises(DataError, match="tgt has dtype float64"):
        check_matches(mixed, dtype="float32")
