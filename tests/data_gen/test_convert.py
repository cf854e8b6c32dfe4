"""Conversion between formats: the values are equal, or an error leaves existing files unchanged."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import signal
import struct
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from data_gen import Recipe, array_readers, generate
from data_gen import convert as convert_module
from data_gen.bfloat16 import from_bfloat16, to_bfloat16
from data_gen.convert import convert
from data_gen.formats import ITEM_BYTES
from ddp_hpc.base.errors import DataError, DdpHpcError, RequestError
from ddp_hpc.data.open_file import open_samples

SRC = np.random.default_rng(0).normal(size=(7, 2, 3)).astype(np.float32)
TGT = np.arange(7, dtype=np.int32) % 3
TEST = {"test/src": SRC[:2] + 1, "test/tgt": TGT[:2]}
FORMATS = [".h5", ".pt", ".safetensors", ".npz", ".npy", ".idx"]
BOTH = FORMATS[:4]


def idx_bytes(array: np.ndarray, code: int) -> bytes:
    head = bytes((0, 0, code, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write(path: Path, arrays: dict[str, np.ndarray], **marks: object) -> list[Path]:
    """Writes the inputs of a conversion with the reference library of each format."""
    if path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            file.attrs.update(marks)
            for name, array in arrays.items():
                file[name] = array
    elif path.suffix == ".pt":
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()} | marks, path)
    elif path.suffix == ".safetensors":
        save_file(arrays, path, {key: str(value) for key, value in marks.items()})
    elif path.suffix == ".npz":
        np.savez(path, **arrays, **marks)
    else:
        paths = [path.with_suffix(f".{name}{path.suffix}") for name in ("src", "tgt")]
        for one, array, code in zip(paths, arrays.values(), (13, 12), strict=False):
            if path.suffix == ".npy":
                np.save(one, array)
            else:
                one.write_bytes(idx_bytes(array, code))
        return paths
    return [path]


def read(paths: list[Path]) -> dict[str, np.ndarray]:
    """Reads the arrays of the outputs with the reference library of each format."""
    suffix = paths[0].suffix
    if suffix == ".h5":
        with h5py.File(paths[0]) as file:
            names = [name for name in ("src", "tgt", "test/src", "test/tgt") if name in file]
            return {name: file[name][:] for name in names}
    if suffix == ".pt":
        entries = torch.load(paths[0], weights_only=True)
        return {name: value.numpy() for name, value in entries.items() if isinstance(value, torch.Tensor)}
    if suffix == ".safetensors":
        return load_file(paths[0])
    if suffix == ".npz":
        with np.load(paths[0]) as file:
            return {name: file[name] for name in file.files if file[name].ndim}
    if suffix == ".npy":
        return {path.name.split(".", 1)[1].removesuffix(".npy"): np.load(path) for path in paths}
    # http://yann.lecun.com/exdb/mnist/
    dtypes = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
    found = {}
    for path in paths:
        data = path.read_bytes()
        shape = struct.unpack_from(f">{data[3]}I", data, 4)
        values = np.frombuffer(data, dtypes[data[2]], offset=4 + 4 * data[3]).reshape(shape)
        found[path.name.split(".")[1]] = values.astype(values.dtype.newbyteorder("="))
    return found


def converted(inputs: list[Path], output: Path, **options: object) -> dict[str, np.ndarray]:
    return read([result.path for result in convert(inputs, output, **options)])


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def refused(
    inputs: list[Path],
    output: Path,
    error: type[DdpHpcError] = DataError,
    *,
    watched: Path | None = None,
    **options: object,
) -> str:
    """Returns the message of the error; no file may have changed."""
    watched = watched or output.parent
    before = {path: path.lstat().st_mtime_ns for path in watched.iterdir()}
    with pytest.raises(error) as caught:
        convert(inputs, output, **options)
    assert {path: path.lstat().st_mtime_ns for path in watched.iterdir()} == before
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.fixture
def h5(tmp_path: Path) -> Path:
    return write(tmp_path / "in.h5", {"src": SRC, "tgt": TGT})[0]


@pytest.mark.parametrize("end", FORMATS)
@pytest.mark.parametrize("start", FORMATS)
def test_every_format_becomes_every_other(tmp_path, monkeypatch, start, end):
    monkeypatch.setattr(array_readers, "_BLOCK_BYTES", 50)  # two samples of src
    monkeypatch.setattr(convert_module, "_BLOCK_BYTES", 60)
    inputs = write(tmp_path / f"in{start}", {"src": SRC, "tgt": TGT})
    same(converted(inputs, tmp_path / f"out{end}"), {"src": SRC, "tgt": TGT})


@pytest.mark.parametrize("start", BOTH)
def test_test_split_classes_and_source_are_kept(tmp_path, start):
    path = tmp_path / f"in{start}"
    write(path, {"src": SRC, "tgt": TGT, **TEST}, num_classes=3, source="a paper")
    for end in BOTH:
        [result] = convert([path], tmp_path / f"{start}-out{end}")
        same(read([result.path]), {"src": SRC, "tgt": TGT, **TEST})
        path = result.path
    with np.load(path) as file:
        assert (file["num_classes"], file["source"]) == (3, "a paper")
    with h5py.File(tmp_path / f"{start}-out.h5") as file:
        assert (file.attrs["num_classes"], file.attrs["source"]) == (3, "a paper")
    assert open_samples(tmp_path / f"{start}-out.pt").num_classes == 3


def test_npy_has_a_file_for_each_array_of_a_test_split(tmp_path):
    inputs = write(tmp_path / "in.h5", {"src": SRC, "tgt": TGT, **TEST})
    paths = [result.path.name for result in convert(inputs, tmp_path / "out.npy")]
    assert paths == ["out.src.npy", "out.tgt.npy", "out.test.src.npy", "out.test.tgt.npy"]
    np.testing.assert_array_equal(np.load(tmp_path / "out.test.src.npy"), TEST["test/src"])


def test_without_a_source_the_inputs_are_it(tmp_path):
    inputs = write(tmp_path / "in.npy", {"src": SRC, "tgt": TGT})
    convert(inputs, tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert file.attrs["source"] == "converted from in.src.npy, in.tgt.npy"
        assert json.loads(file.attrs["recipe"])["kind"] == "converted"


@pytest.mark.parametrize("dtype", sorted(set(ITEM_BYTES) - {"bfloat16"}))
def test_every_dtype_is_kept(tmp_path, dtype):
    arrays = {"src": np.array([[0, 1], [1, 1]], dtype), "tgt": TGT[:2]}
    inputs = write(tmp_path / "in.npz", arrays)
    fits_idx = dtype in ("uint8", "int8", "int16", "int32", "float32", "float64")
    for end in (*BOTH, ".npy", *([".idx", "-again.h5"] if fits_idx else [])):
        inputs = [result.path for result in convert(inputs, tmp_path / f"out{end}")]
        same(read(inputs), arrays)


def test_big_endian_inputs_are_converted(tmp_path):
    inputs = write(tmp_path / "in.npy", {"src": SRC.astype(">f4"), "tgt": TGT.astype(">i4")})
    same(converted(inputs, tmp_path / "out.npz"), {"src": SRC, "tgt": TGT})


def test_compressed_inputs_are_unpacked(tmp_path):
    np.savez_compressed(tmp_path / "in.npz", src=SRC, tgt=TGT)
    same(converted([tmp_path / "in.npz"], tmp_path / "one.h5"), {"src": SRC, "tgt": TGT})
    np.save(tmp_path / "src.npy", SRC)
    for name, content in (("src.gz", (tmp_path / "src.npy").read_bytes()), ("tgt", idx_bytes(TGT, 12))):
        (tmp_path / name).write_bytes(gzip.compress(content))
    inputs = [tmp_path / "src.gz", tmp_path / "tgt"]
    same(converted(inputs, tmp_path / "two.h5"), {"src": SRC, "tgt": TGT})


@pytest.mark.parametrize("start", BOTH)
def test_arrays_with_other_names_become_src_and_tgt(tmp_path, start):
    inputs = write(tmp_path / f"in{start}", {"x": SRC, "y": TGT, "z": TGT})
    same(converted(inputs, tmp_path / "out.safetensors", src_key="x", tgt_key="y"), {"src": SRC, "tgt": TGT})
    assert "has no array 'src'" in refused(inputs, tmp_path / "other.npz") or start == ".h5"


# Difficult values for a conversion: ties, NaN, infinities, subnormals, a large number.
FLOATS = np.array([0.1, -1.00390625, 1.01171875, np.nan, np.inf, -np.inf, 1e-40, 60928.0, -0.0], np.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("start", ["float16", "bfloat16", "float32", "float64"])
def test_floats_are_converted_as_torch_does_and_integers_stay(tmp_path, start, dtype):
    src = torch.from_numpy(FLOATS).to(getattr(torch, start))
    torch.save({"src": src, "tgt": torch.arange(9)}, tmp_path / "in.pt")
    [result] = convert([tmp_path / "in.pt"], tmp_path / "out.pt", dtype=dtype)
    found = torch.load(result.path, weights_only=True)
    wanted = src.to(getattr(torch, dtype))
    assert found["src"].dtype == wanted.dtype
    torch.testing.assert_close(found["src"], wanted, rtol=0, atol=0, equal_nan=True)
    assert found["tgt"].dtype == torch.int64


@pytest.mark.parametrize(
    ("value", "dtype"), [(7e4, "float16"), (-3.4e38, "bfloat16"), (1e39, "bfloat16"), (1e39, "float32")]
)
def test_values_beyond_the_new_dtype_are_refused(tmp_path, value, dtype):
    inputs = write(tmp_path / "in.npz", {"src": np.array([1.0, np.inf, value]), "tgt": TGT[:3]})
    assert f"src has values too large for {dtype}" in refused(inputs, tmp_path / "out.h5", dtype=dtype)


def test_the_largest_bfloat16_is_not_too_large(tmp_path):
    inputs = write(tmp_path / "in.npz", {"src": np.array([3.3895313892515355e38, -np.inf]), "tgt": TGT[:2]})
    convert(inputs, tmp_path / "out.pt", dtype="bfloat16")
    found = torch.load(tmp_path / "out.pt", weights_only=True)["src"]
    assert found.tolist() == [torch.finfo(torch.bfloat16).max, -np.inf]


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
def test_a_nan_stays_one_whatever_its_bits(bits):
    (found,) = to_bfloat16(np.array([bits], np.uint32).view(np.float32))
    assert np.isnan(from_bfloat16(found))


@pytest.mark.parametrize(
    ("dtype", "output", "message"),
    [
        (
            "bfloat16",
            "out.npz",
            "src has dtype bfloat16, which NumPy does not support. Write an .h5 file or add --dtype",
        ),
        ("bfloat16", "out.npy", "src has dtype bfloat16, which NumPy does not support"),
        (
            "float16",
            "out.idx",
            "src has dtype float16, but IDX supports only uint8, int8, int16, int32, float32, float64",
        ),
    ],
)
def test_arrays_that_the_output_cannot_store_are_rejected(tmp_path, h5, dtype, output, message):
    assert message in refused([h5], tmp_path / output, RequestError, dtype=dtype)


def test_a_file_made_from_the_same_input_is_reused(tmp_path, h5):
    for end in BOTH:
        [first], [again] = (convert([h5], tmp_path / f"out{end}") for _ in range(2))
        assert (first.reused, again.reused) == (False, True)


@pytest.mark.parametrize("end", BOTH)
def test_a_file_made_from_another_input_is_replaced_only_with_force(tmp_path, h5, end):
    output = tmp_path / f"out{end}"
    convert([h5], output)
    os.utime(h5, ns=(0, 0))
    assert "exists with different contents" in refused([h5], output, RequestError)
    assert not convert([h5], output, force=True)[0].reused


def test_for_another_kind_of_file_only_the_kind_is_reported(tmp_path, h5):
    output = tmp_path / "out.h5"
    generate(Recipe(num_samples=2, src_shape=(3,), tgt_shape=(1,)), output)
    text = refused([h5], output, RequestError)
    assert "exists with different contents: kind is synthetic instead of converted. " in text


def test_the_file_records_its_inputs(tmp_path, h5):
    (tmp_path / "link.h5").symlink_to(h5)
    convert([tmp_path / "link.h5"], tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        recipe = json.loads(file.attrs["recipe"])
    assert recipe["inputs"] == [str(h5.resolve())]


@pytest.mark.parametrize("end", BOTH)
def test_inputs_of_equal_name_size_and_time_are_distinguished(tmp_path, end):
    inputs = []
    for directory in (tmp_path / "a", tmp_path / "b"):
        directory.mkdir()
        inputs.append(write(directory / "x.npy", {"src": SRC + len(inputs), "tgt": TGT}))
        for path in inputs[-1]:
            os.utime(path, ns=(0, 0))
    convert(inputs[0], tmp_path / f"out{end}")
    assert "exists with different contents" in refused(inputs[1], tmp_path / f"out{end}", RequestError)
    for mine, other in zip(*inputs, strict=True):
        other.replace(mine)
    assert "exists with different contents" in refused(inputs[0], tmp_path / f"out{end}", RequestError)


@pytest.mark.parametrize("end", FORMATS)
def test_a_file_not_written_by_data_gen_is_not_overwritten(tmp_path, h5, end):
    other = tmp_path / ("out.tgt" + end if end in (".npy", ".idx") else "out" + end)
    other.write_bytes(b"mine")
    assert f"{other} exists" in refused([h5], tmp_path / f"out{end}", RequestError)
    assert other.read_bytes() == b"mine"
    convert([h5], tmp_path / f"out{end}", force=True)
    assert other.read_bytes() != b"mine"


@pytest.mark.parametrize("kind", ["same", "symbolic link", "hard link"])
@pytest.mark.parametrize("end", [".h5", ".npz"])
def test_an_input_is_never_its_own_output(tmp_path, kind, end):
    [path] = write(tmp_path / f"in{end}", {"src": SRC, "tgt": TGT})
    output = tmp_path / f"out{end}"
    if kind == "same":
        output = path
    elif kind == "hard link":
        output.hardlink_to(path)
    else:
        output.symlink_to(path)
    assert "is the same file as the input" in refused([path], output, RequestError, force=True)
    same(read([path]), {"src": SRC, "tgt": TGT})


def npy_bytes(array: np.ndarray, **options: object) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def header(text: str) -> bytes:
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy_bytes(SRC)[:-1], "its header describes 296"),
        (npy_bytes(SRC) + b"x", "its header describes 296"),
        (npy_bytes(SRC)[:60], "damaged .npy header"),
        (npy_bytes(np.asfortranarray(SRC)), "Fortran order"),
        (npy_bytes(np.array([{}, 1]), allow_pickle=True), "dtype object"),
        (npy_bytes(SRC + 1j), "dtype complex64"),
        (npy_bytes(np.zeros(7, [("a", "<f4")])), "dtype [('a', '<f4')]"),
        (npy_bytes(SRC[:0]), "no samples"),
        (npy_bytes(SRC[:, :0]), "its samples are empty"),
        (npy_bytes(SRC[0, 0, 0]), "a single value"),
        (npy_bytes(SRC[:6]), "src has 6 samples, but tgt has 7"),
        (npy_bytes(np.zeros((7,) + (1,) * 40)), "40 axes; at most 31"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (-7,)}"), "damaged .npy header"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (10**9,)}"), "damaged .npy header"),
        (
            header("{'descr': '<f4', 'fortran_order': False, 'shape': (7, 1000000000000)}"),
            "its header describes",
        ),
        (header("{[]: 1}"), "damaged .npy header"),
        (header("(" * 900), "damaged .npy header"),
        (header(f"{{'descr': '<f4', '{'x' * 5000}': 3}}"), "damaged .npy header"),
        (idx_bytes(SRC, 13)[:-1], "its header describes 184"),
        (gzip.compress(idx_bytes(SRC, 13))[:-9], "cannot be read"),
        (gzip.compress(idx_bytes(SRC, 13)[:-5]), "src ends after 6 of 7 samples"),
        (gzip.compress(idx_bytes(SRC, 13) + b"x"), "src has more data than the 7 samples in its header"),
        (b"\0\0\x0d\3\0\0\0\7", "ends inside its header of 16 bytes"),
        (b"\0\0\x0d\0" + bytes(4), "a single value"),
        (b"", "begins with no bytes"),
        (b"PK\3\4", "neither a .npy nor an IDX file"),
    ],
)
def test_an_invalid_array_is_rejected(tmp_path, content, message):
    (tmp_path / "src.npy").write_bytes(content)
    np.save(tmp_path / "tgt.npy", TGT)
    assert message in refused([tmp_path / "src.npy", tmp_path / "tgt.npy"], tmp_path / "out.h5")


def test_damaged_files_give_an_error_or_the_right_values(tmp_path):
    rng = random.Random(0)
    np.savez_compressed(tmp_path / "in.npz", src=SRC, tgt=TGT, num_classes=3)
    convert([tmp_path / "in.npz"], tmp_path / "plain.npz")
    (tmp_path / "out").mkdir()
    for whole in ((tmp_path / "in.npz").read_bytes(), (tmp_path / "plain.npz").read_bytes()):
        for number in range(150):
            data = bytearray(whole)
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path = tmp_path / "damaged.npz"
            path.write_bytes(data[: rng.randrange(len(data))] if number % 3 == 0 else data)
            with suppress(DdpHpcError):  # Not every bit matters, but any other exception is a bug.
                convert([path], tmp_path / "out" / "out.npy", force=True)
            assert all(entry.name.startswith("out.") for entry in (tmp_path / "out").iterdir())


def test_a_flipped_bit_in_an_npz_is_detected(tmp_path, h5):
    [result] = convert([h5], tmp_path / "in.npz")
    data = bytearray(result.path.read_bytes())
    data[data.index(SRC.tobytes()) + 5] ^= 1
    result.path.write_bytes(data)
    assert "Bad CRC-32 for file 'src.npy'" in refused([result.path], tmp_path / "out.h5")


@pytest.mark.parametrize("start", BOTH)
def test_a_truncated_file_is_rejected(tmp_path, start):
    [path] = write(tmp_path / f"in{start}", {"src": SRC, "tgt": TGT})
    path.write_bytes(path.read_bytes()[:-20])
    assert f"in{start} " in refused([path], tmp_path / "out.npy")


def test_a_long_source_is_shortened(tmp_path):
    inputs = write(tmp_path / "in.npz", {"src": SRC, "tgt": TGT}, source="a\0b" * 50_000)
    [result] = convert(inputs, tmp_path / "out.h5")
    with h5py.File(result.path) as file:
        assert file.attrs["source"] == ("ab" * 2048)


def test_inconsistent_npz_members_are_rejected(tmp_path):
    inputs = write(tmp_path / "in.npz", {"src": SRC, "tgt": TGT, "test/src": SRC})
    assert "has test/src but no test/tgt" in refused(inputs, tmp_path / "out.h5")
    inputs = write(tmp_path / "in.npz", {"src": SRC, "tgt": TGT, "test/src": SRC[:, 0], "test/tgt": TGT})
    assert "both splits must have the same" in refused(inputs, tmp_path / "out.h5")
    inputs = write(tmp_path / "in.npz", {"src": SRC, "tgt": TGT}, num_classes=0)
    assert "num_classes is '0'" in refused(inputs, tmp_path / "out.h5")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["in.npy"], "in.npy contains only one array"),
        (["in.h5", "in.h5"], "in.h5 is in a format that contains both arrays"),
        (["in.npy"] * 3, "got 3 inputs"),
        ([], "got 0 inputs"),
    ],
)
def test_a_wrong_number_of_inputs_is_refused(tmp_path, names, message):
    assert message in refused([tmp_path / name for name in names], tmp_path / "out.h5", RequestError)


def test_pipes_and_directories_are_rejected(tmp_path, h5):
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "directory.h5").mkdir()
    for name in ("pipe.npy", "directory.h5"):
        assert "not a regular file" in refused(
            [tmp_path / name] * (1 + (name == "pipe.npy")), tmp_path / "o.h5"
        )
    assert "No such file" in refused([tmp_path / "nowhere.h5"], tmp_path / "o.h5")
    assert "is a directory" in refused([h5], tmp_path / "directory.h5", RequestError, force=True)
    assert "unknown suffix '.hd5' (did you mean" in refused([h5], tmp_path / "o.hd5", RequestError)


def test_files_without_read_or_write_permission_are_reported(open_folder, as_nobody):
    inputs = write(open_folder / "in.npy", {"src": SRC, "tgt": TGT})
    with as_nobody():
        assert "Permission denied" in refused(inputs, open_folder / "out.npz", DdpHpcError)
    inputs[0].chmod(0)
    with as_nobody():
        assert "Permission denied" in refused(inputs, open_folder / "out.npz")


def test_inaccessible_outputs_are_reported(open_folder, as_nobody):
    inputs = write(open_folder / "in.npz", {"src": SRC, "tgt": TGT})
    (open_folder / "mine").mkdir(mode=0o700)
    with as_nobody():
        for end in (".h5", ".npz", ".npy"):
            message = refused(
                inputs, open_folder / "mine" / f"x{end}", RequestError, force=True, watched=open_folder
            )
            assert "Permission denied" in message
    assert "File name too long" in refused(
        inputs, open_folder / ("x" * 300 + ".npz"), RequestError, force=True
    )


def test_attributes_that_numpy_does_not_support_are_ignored(tmp_path, h5):
    def set_time(file: h5py.File, name: bytes) -> None:
        h5py.h5a.create(file.id, name, h5py.h5t.UNIX_D32LE, h5py.h5s.create(h5py.h5s.SCALAR))

    with h5py.File(h5, "r+") as file:
        file.attrs["source"] = "a paper"
        set_time(file, b"when")
    same(converted([h5], tmp_path / "one.npz"), {"src": SRC, "tgt": TGT})
    assert np.load(tmp_path / "one.npz")["source"] == "a paper"
    with h5py.File(h5, "r+") as file:
        del file.attrs["source"]
        set_time(file, b"source")
    same(converted([h5], tmp_path / "two.npz"), {"src": SRC, "tgt": TGT})
    assert np.load(tmp_path / "two.npz")["source"] == "converted from in.h5"


def test_every_array_in_a_safetensors_file_is_aligned(tmp_path):
    arrays = {"src": np.arange(7, dtype=np.uint8), "tgt": np.arange(7, dtype=np.float64)}
    same(converted(write(tmp_path / "in.npz", arrays), tmp_path / "out.safetensors"), arrays)
    content = (tmp_path / "out.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    entry = json.loads(content[8 : 8 + length])["tgt"]
    assert (8 + length + entry["data_offsets"][0]) % 8 == 0


def test_an_input_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch, h5):
    monkeypatch.setattr(
        convert_module, "_BLOCK_BYTES", 30
    )  # more samples are read after the first is written
    for end in (".npz", ".safetensors"):
        with pytest.raises(DataError, match=r"in\.h5 changed while it was read"):
            convert([h5], tmp_path / f"out{end}", progress=lambda *_: os.utime(h5))
    assert list(tmp_path.iterdir()) == [h5]


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Limits the size of files, so that writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("end", FORMATS)
def test_a_full_disk_is_one_error_and_existing_files_are_kept(tmp_path, end):
    big = np.zeros((40, 1000), np.float32)
    inputs = write(tmp_path / "in.npz", {"src": big[:, :1], "tgt": big})
    outputs = [result.path for result in convert(inputs, tmp_path / f"out{end}")]
    before = [path.read_bytes() for path in outputs]
    with largest_file(100_000):
        message = refused(inputs, tmp_path / f"out{end}", DdpHpcError, force=True)
    assert "was not written" in message
    assert [path.read_bytes() for path in outputs] == before


def test_no_partial_file_is_left_after_a_signal(tmp_path, h5):
    class Stopped(BaseException):
        pass

    def interrupt(done_bytes: int, total_bytes: int) -> None:
        assert total_bytes == SRC.nbytes + TGT.nbytes
        raise Stopped

    for end in (".npz", ".npy"):
        with pytest.raises(Stopped):
            convert([h5], tmp_path / f"out{end}", progress=interrupt)
    assert list(tmp_path.iterdir()) == [h5]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(("start", "end"), [(".npy", ".npz"), (".npz", ".h5"), (".h5", ".npy")])
def test_memory_does_not_grow_with_the_file(tmp_path, start, end):
    num_bytes = 96 * 2**20
    inputs = write(
        tmp_path / f"in{start}",
        {
            "src": np.zeros((num_bytes // 4096, 1024), np.float32),
            "tgt": np.zeros((num_bytes // 4096, 1), np.uint8),
        },
    )
    tracemalloc.start()
    try:
        convert(inputs, tmp_path / f"out{end}")
        assert tracemalloc.get_traced_memory()[1] < num_bytes / 2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "name", ["a b;'$(x)\n", "-x", "\udcff", "sr\u00e7 \U0001f600", "%s{x}", "x" * 230, "\u00e9" * 115]
)
def test_files_with_unusual_names_are_converted(tmp_path, name):
    inputs = write(tmp_path / f"{name}.npz", {"src": SRC, "tgt": TGT})
    # torch cannot map a .pt file whose name is not UTF-8, so that one comes last.
    for end in (".h5", ".safetensors", ".npz", ".pt"):
        [result] = convert(inputs, tmp_path / f"{name}-out{end}")
        same(read([result.path]), {"src": SRC, "tgt": TGT})
        inputs = [result.path]


def test_npz_is_an_uncompressed_zip_that_numpy_reads_without_pickle(tmp_path, h5):
    convert([h5], tmp_path / "out.npz")
    with zipfile.ZipFile(tmp_path / "out.npz") as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert archive.namelist() == ["src.npy", "tgt.npy", "recipe.npy", "source.npy"]


def test_the_command_prints_the_paths_it_wrote(tmp_path, h5, run_generator):
    done = run_generator("convert", "in.h5", "--dtype", "float64", "out.npy")
    assert (done.returncode, done.stdout) == (0, "out.src.npy\nout.tgt.npy\n")
    assert np.load(tmp_path / "out.src.npy").dtype == np.float64
    again = run_generator("convert", "in.h5", "--dtype", "float64", "out.npy")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith("error: out.src.npy exists")
    assert again.stderr.count("\n") == 1
