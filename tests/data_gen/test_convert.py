"""Conversion between formats: the values are equal, or an error leaves existing files unchanged."""

from __future__ import annotations

import io
import json
import os
import struct
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from data_gen import Recipe, generate
from data_gen import convert as convert_module
from data_gen.convert import convert
from ddp_hpc.base.errors import DataError, DdpHpcError, RequestError
from ddp_hpc.data.open_file import open_samples

SRC = np.random.default_rng(0).normal(size=(7, 2, 3)).astype(np.float32)
TGT = np.arange(7, dtype=np.int32) % 3
TEST = {"test/src": SRC[:2] + 1, "test/tgt": TGT[:2]}
OUTPUTS = [".h5", ".pt", ".safetensors"]
INPUTS = [*OUTPUTS, ".npz", ".npy"]


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
        np.savez_compressed(path, **arrays)
    else:
        paths = [path.with_suffix(f".{name}{path.suffix}") for name in ("src", "tgt")]
        for each, array in zip(paths, arrays.values(), strict=True):
            np.save(each, array)
        return paths
    return [path]


def read(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of the output with the reference library of its format."""
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            names = [name for name in ("src", "tgt", "test/src", "test/tgt") if name in file]
            return {name: file[name][:] for name in names}
    if path.suffix == ".pt":
        entries = torch.load(path, weights_only=True)
        return {name: value.numpy() for name, value in entries.items() if isinstance(value, torch.Tensor)}
    return load_file(path)


def converted(inputs: list[Path], output: Path, **options: object) -> dict[str, np.ndarray]:
    return read(convert(inputs, output, **options).path)


def same(arrays: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)


def refused(inputs: list[Path], output: Path, error: type[DdpHpcError] = DataError, **options: object) -> str:
    """Returns the message of the error; no file may have changed."""
    before = {path: path.lstat().st_mtime_ns for path in output.parent.iterdir()}
    with pytest.raises(error) as caught:
        convert(inputs, output, **options)
    assert {path: path.lstat().st_mtime_ns for path in output.parent.iterdir()} == before
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.fixture
def h5(tmp_path: Path) -> Path:
    return write(tmp_path / "in.h5", {"src": SRC, "tgt": TGT})[0]


@pytest.mark.parametrize("end", OUTPUTS)
@pytest.mark.parametrize("start", INPUTS)
def test_every_format_is_converted(tmp_path, monkeypatch, start, end):
    monkeypatch.setattr(convert_module, "_BLOCK_BYTES", 60)  # two samples
    inputs = write(tmp_path / f"in{start}", {"src": SRC, "tgt": TGT})
    same(converted(inputs, tmp_path / f"out{end}"), {"src": SRC, "tgt": TGT})


@pytest.mark.parametrize("start", OUTPUTS)
def test_test_split_and_classes_are_kept(tmp_path, start):
    path = tmp_path / f"in{start}"
    write(path, {"src": SRC, "tgt": TGT, **TEST}, num_classes=3)
    for end in OUTPUTS:
        path = convert([path], tmp_path / f"{start}-out{end}").path
        same(read(path), {"src": SRC, "tgt": TGT, **TEST})
        assert open_samples(path).num_classes == 3


def test_big_endian_and_fortran_order_are_converted(tmp_path):
    inputs = write(tmp_path / "in.npy", {"src": np.asfortranarray(SRC), "tgt": TGT.astype(">i4")})
    same(converted(inputs, tmp_path / "out.h5"), {"src": SRC, "tgt": TGT})


@pytest.mark.parametrize("start", [*OUTPUTS, ".npz"])
def test_arrays_with_other_names_become_src_and_tgt(tmp_path, start):
    inputs = write(tmp_path / f"in{start}", {"x": SRC, "y": TGT, "z": TGT})
    same(converted(inputs, tmp_path / "out.safetensors", src_key="x", tgt_key="y"), {"src": SRC, "tgt": TGT})
    assert "'src'" in refused(inputs, tmp_path / "other.h5")


@pytest.mark.parametrize("end", OUTPUTS)
def test_the_bits_of_bfloat16_are_kept(tmp_path, end):
    src = torch.tensor([0.1, -1.01171875, torch.nan, torch.inf, -0.0], dtype=torch.bfloat16)
    torch.save({"src": src, "tgt": torch.arange(5)}, tmp_path / "in.pt")
    samples = open_samples(convert([tmp_path / "in.pt"], tmp_path / f"out{end}").path)
    assert samples.src.bfloat16
    assert torch.equal(torch.from_numpy(samples.read(np.arange(5))[0]), src.view(torch.uint16))


@pytest.mark.parametrize("end", OUTPUTS)
def test_a_file_made_from_the_same_input_is_reused_and_another_is_replaced_only_with_force(tmp_path, h5, end):
    output = tmp_path / f"out{end}"
    assert not convert([h5], output).reused
    assert convert([h5], output).reused
    os.utime(h5, ns=(0, 0))
    assert "exists with different contents" in refused([h5], output, RequestError)
    assert not convert([h5], output, force=True).reused


def test_the_file_records_its_inputs(tmp_path, h5):
    (tmp_path / "link.h5").symlink_to(h5)
    convert([tmp_path / "link.h5"], tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert json.loads(file.attrs["recipe"])["inputs"] == [str(h5.resolve())]
        assert file.attrs["source"] == "converted from link.h5"
    generate(Recipe(num_samples=2, src_shape=(3,), tgt_shape=(1,)), tmp_path / "other.h5")
    text = refused([h5], tmp_path / "other.h5", RequestError)
    assert "exists with different contents: kind is 'synthetic' instead of 'converted'. " in text


@pytest.mark.parametrize("kind", ["same", "symbolic link", "hard link"])
def test_an_input_is_never_its_own_output(tmp_path, h5, kind):
    output = h5 if kind == "same" else tmp_path / "out.h5"
    if kind == "hard link":
        output.hardlink_to(h5)
    elif kind == "symbolic link":
        output.symlink_to(h5)
    assert "is the same file as the input" in refused([h5], output, RequestError, force=True)


def npy_bytes(array: np.ndarray, **options: object) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy_bytes(SRC)[:-1], "src.npy cannot be read by NumPy: mmap length is greater than file"),
        (npy_bytes(SRC)[:60], "src.npy cannot be read by NumPy: EOF"),
        (b"\x93NUMPY\1\0\6\0{[]: 1", "src.npy cannot be read by NumPy: "),
        (b"PK\3\4", "src.npy cannot be read by NumPy"),
        (npy_bytes(np.array([{}, 1]), allow_pickle=True), "src.npy cannot be read by NumPy"),
        (npy_bytes(np.zeros(7, [("a", "<f4")])), "dtype [('a', '<f4')]"),
        (npy_bytes(SRC[:0]), "src.npy, tgt.npy: src has shape (0, 2, 3) and thus no samples"),
        (npy_bytes(SRC[:6]), "src has 6 samples, but tgt has 7"),
        (npy_bytes(np.zeros((7,) + (1,) * 40)), "40 axes; at most 31"),
    ],
)
def test_an_invalid_array_is_rejected(tmp_path, content, message):
    (tmp_path / "src.npy").write_bytes(content)
    np.save(tmp_path / "tgt.npy", TGT)
    assert message in refused([tmp_path / "src.npy", tmp_path / "tgt.npy"], tmp_path / "out.h5")


@pytest.mark.parametrize("start", [*OUTPUTS, ".npz"])
def test_a_truncated_file_is_rejected(tmp_path, start):
    [path] = write(tmp_path / f"in{start}", {"src": SRC, "tgt": TGT})
    path.write_bytes(path.read_bytes()[:-20])
    assert f"in{start} " in refused([path], tmp_path / "out.h5")


def test_a_flipped_bit_in_an_npz_is_detected(tmp_path):
    np.savez(tmp_path / "in.npz", src=SRC, tgt=TGT)
    data = bytearray((tmp_path / "in.npz").read_bytes())
    data[data.index(SRC.tobytes()) + 5] ^= 1
    (tmp_path / "in.npz").write_bytes(data)
    assert "Bad CRC-32 for file 'src.npy'" in refused([tmp_path / "in.npz"], tmp_path / "out.h5")


@pytest.mark.parametrize("names", [["in.npy"], ["in.h5", "in.h5"], ["in.npy"] * 3, []])
def test_a_wrong_number_of_inputs_is_refused(tmp_path, names):
    message = refused([tmp_path / name for name in names], tmp_path / "out.h5", RequestError)
    assert "pass one file with both arrays" in message


def test_pipes_and_directories_are_rejected(tmp_path, h5):
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "directory.h5").mkdir()
    assert "not a regular file" in refused([tmp_path / "pipe.npy"] * 2, tmp_path / "o.h5")
    assert "is a directory" in refused([tmp_path / "directory.h5"], tmp_path / "o.h5")
    assert "no such file" in refused([tmp_path / "nowhere.h5"], tmp_path / "o.h5")
    assert "is a directory" in refused([h5], tmp_path / "directory.h5", RequestError, force=True)
    assert "unknown suffix '.hd5' (did you mean" in refused([h5], tmp_path / "o.hd5", RequestError)


def test_files_without_read_or_write_permission_are_reported(open_folder, as_nobody):
    inputs = write(open_folder / "in.npy", {"src": SRC, "tgt": TGT})
    open_folder.chmod(0o755)
    with as_nobody():
        assert "Permission denied" in refused(inputs, open_folder / "out.h5", DdpHpcError)
    inputs[0].chmod(0)
    with as_nobody():
        assert "Permission denied" in refused(inputs, open_folder / "out.h5")


def test_every_array_in_a_safetensors_file_is_aligned(tmp_path):
    arrays = {"src": np.arange(7, dtype=np.uint8), "tgt": np.arange(7, dtype=np.float64)}
    same(converted(write(tmp_path / "in.npz", arrays), tmp_path / "out.safetensors"), arrays)
    content = (tmp_path / "out.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    entry = json.loads(content[8 : 8 + length])["tgt"]
    assert (8 + length + entry["data_offsets"][0]) % 8 == 0


def test_an_input_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch, h5):
    # More samples are read after the first are written.
    monkeypatch.setattr(convert_module, "_BLOCK_BYTES", 30)
    with pytest.raises(DataError, match=r"in\.h5 changed while it was read"):
        convert([h5], tmp_path / "out.safetensors", progress=lambda *_: os.utime(h5))
    assert list(tmp_path.iterdir()) == [h5]


def test_memory_does_not_grow_with_the_file(tmp_path):
    num_bytes = 96 * 2**20
    src = np.lib.format.open_memmap(tmp_path / "src.npy", "w+", np.float32, (num_bytes // 4096, 1024))
    np.save(tmp_path / "tgt.npy", np.zeros(len(src), np.uint8))
    del src
    tracemalloc.start()
    try:
        convert([tmp_path / "src.npy", tmp_path / "tgt.npy"], tmp_path / "out.h5")
        assert tracemalloc.get_traced_memory()[1] < num_bytes / 2
    finally:
        tracemalloc.stop()
