"""One snapshot on disk: it is read as it was written or not at all, and it executes no code."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ddp_hpc.base.errors import DataError, DdpHpcError
from ddp_hpc.training.snapshots import host_buffer as image_module
from ddp_hpc.training.snapshots.host_buffer import DTYPES as SAVED_DTYPES
from ddp_hpc.training.snapshots.host_buffer import FileBuffer, specs_of
from ddp_hpc.training.snapshots.snapshot_files import (
    MODEL,
    TRAINING,
    DamagedSnapshotError,
    _sealed,
    find_snapshots,
    read_about,
    read_snapshot,
    write_snapshot,
)

MANIFEST = "snapshot.json"
DTYPES = sorted(SAVED_DTYPES, key=str)
ABOUT = {"position": {"step": 7}, "seed": 0, "losses": {"last": 1 / 3}, "model": "linear"}


def _tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Each dtype in odd sizes, which need alignment; also 0-d and empty tensors."""
    draw = torch.Generator().manual_seed(seed)
    found = {f"odd.{dtype}": (torch.randn(3, 5, generator=draw) * 50).to(dtype) for dtype in DTYPES}
    return {
        **found,
        "step": torch.tensor(12.0),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 4),
        "\u00fc.name with spaces": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def _write(folder: Path, step: int = 7, seed: int = 0) -> Path:
    files = {}
    for name in (MODEL, TRAINING):
        tensors = _tensors(seed)
        files[name] = FileBuffer(specs_of(tensors))
        files[name].fill(tensors.items())
    return write_snapshot(folder, step, ABOUT, files)


def _content(image: FileBuffer) -> bytes:
    return b"".join(part.numpy().tobytes() for part in image.parts)


def _bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("written"))


@pytest.fixture
def snapshot(written: Path, tmp_path: Path) -> Path:
    """A copy of a valid snapshot, for tests that damage it."""
    return Path(shutil.copytree(written, tmp_path / written.name))


def _seal(snapshot: Path, about: dict[str, object]) -> None:
    """Writes a manifest with a correct checksum, like an attacker."""
    (snapshot / MANIFEST).write_bytes(_sealed(about))


def _about(snapshot: Path) -> dict[str, object]:
    about = json.loads((snapshot / MANIFEST).read_text())
    del about["sha256"]
    return dict(about)


def test_a_snapshot_is_read_as_it_was_written(written: Path) -> None:
    found = read_snapshot(written)
    expected = {name: _bits(tensor) for name, tensor in _tensors().items()}
    assert {name: _bits(tensor) for name, tensor in found.model.items()} == expected
    assert {name: _bits(tensor) for name, tensor in found.training.items()} == expected
    assert {key: found.about[key] for key in ABOUT} == ABOUT
    assert find_snapshots(written.parent) == [written]


def test_the_tensors_can_be_read_with_plain_safetensors(written: Path) -> None:
    loaded = safetensors.torch.load_file(written / MODEL)
    assert {name: _bits(tensor) for name, tensor in loaded.items()} == {
        name: _bits(tensor) for name, tensor in _tensors().items()
    }


def test_sha256sum_prints_the_checksums_of_the_manifest(written: Path) -> None:
    files = json.loads((written / MANIFEST).read_text())["files"]
    listed = "".join(f"{entry['sha256']}  {name}\n" for name, entry in files.items())
    done = subprocess.run(["sha256sum", "--check", "--strict"], cwd=written, input=listed, text=True)
    assert done.returncode == 0
    assert {name: entry["bytes"] for name, entry in files.items()} == {
        name: (written / name).stat().st_size for name in (MODEL, TRAINING)
    }


def test_a_buffer_is_reused_only_for_matching_tensors() -> None:
    first, second = _tensors(1), _tensors(2)
    image = FileBuffer(specs_of(first))
    image.fill(first.items())
    place = image.parts[0].data_ptr()
    image.fill(second.items())
    assert image.parts[0].data_ptr() == place
    assert _bits(safetensors.torch.load(_content(image))["odd.torch.int8"]) == _bits(second["odd.torch.int8"])
    assert image.matches(specs_of(second))
    assert not image.matches(specs_of({**second, "step": second["step"].double()}))
    assert not image.matches(specs_of({**second, "step": second["step"].reshape(1)}))
    assert not image.matches(specs_of({name: second[name] for name in list(second)[1:]}))


def test_only_the_values_of_a_slice_are_saved() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    tensors = {"column": matrix[:, 1], "transposed": matrix.t()}
    image = FileBuffer(specs_of(tensors))
    image.fill(tensors.items())
    loaded = safetensors.torch.load(_content(image))
    assert torch.equal(loaded["column"], torch.tensor([1.0, 5.0, 9.0]))
    assert torch.equal(loaded["transposed"], matrix.t())


def test_an_unsupported_dtype_is_reported() -> None:
    with pytest.raises(TypeError, match=r"wave has the type torch\.complex64"):
        FileBuffer({"wave": ((2,), torch.complex64)})


def test_a_buffer_takes_little_more_memory_than_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Like pinned memory of torch. Tensors cross the boundaries of the pieces.
    monkeypatch.setattr(image_module, "_MOST_BYTES", 2**12)
    monkeypatch.setattr(image_module, "_LEAST_BYTES", 2**8)
    stream = torch.Generator().manual_seed(0)
    tensors = {
        f"{dtype}": torch.randint(-100, 100, (5, 997), generator=stream).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int8)
    }
    image = FileBuffer(specs_of(tensors))
    image.fill(tensors.items())
    loaded = safetensors.torch.load(_content(image))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    sizes = [part.untyped_storage().nbytes() for part in image.parts]
    assert all(size & (size - 1) == 0 for size in sizes)
    assert image.num_bytes <= sum(sizes) < image.num_bytes + 2**8


@pytest.mark.parametrize("seed", range(200))
def test_a_truncated_or_modified_snapshot_is_not_loaded(snapshot: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = snapshot / (MANIFEST, MODEL, TRAINING)[seed % 3]
    content = bytearray(path.read_bytes())
    if seed % 2:
        place = chance.randrange(len(content))
        content[place] ^= 1 << chance.randrange(8)
    else:
        del content[chance.randrange(len(content)) :]
    path.write_bytes(content)
    with pytest.raises(DamagedSnapshotError, match=path.name):
        read_snapshot(snapshot)


def test_additional_bytes_at_the_end_are_damage(snapshot: Path) -> None:
    for name in (MANIFEST, MODEL, TRAINING):
        with (snapshot / name).open("ab") as file:
            file.write(b"\n")
        with pytest.raises(DamagedSnapshotError, match=name):
            read_snapshot(snapshot)
        with (snapshot / name).open("r+b") as file:
            file.truncate((snapshot / name).stat().st_size - 1)
    read_snapshot(snapshot)


@pytest.mark.parametrize("name", [MANIFEST, MODEL, TRAINING])
def test_a_missing_file_is_damage(snapshot: Path, name: str) -> None:
    (snapshot / name).unlink()
    with pytest.raises(DamagedSnapshotError, match=f"{name}: cannot be read: .*No such file"):
        read_snapshot(snapshot)


@pytest.mark.parametrize("name", [MANIFEST, MODEL, TRAINING])
def test_a_directory_or_a_pipe_in_place_of_a_file_is_damage(snapshot: Path, name: str) -> None:
    for make in (Path.mkdir, os.mkfifo):
        path = snapshot / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)
        with pytest.raises(DamagedSnapshotError, match=name):
            read_snapshot(snapshot)


def test_files_of_two_snapshots_cannot_be_mixed(written: Path, tmp_path: Path) -> None:
    other = _write(tmp_path, seed=1)
    shutil.copy(written / MODEL, other / MODEL)
    with pytest.raises(DamagedSnapshotError, match=f"{MODEL}: the SHA-256"):
        read_snapshot(other)


@pytest.mark.parametrize("number", [0, 2, 4])
def test_another_format_is_rejected_but_not_as_damage(snapshot: Path, number: int) -> None:
    _seal(snapshot, {**_about(snapshot), "format": number})
    for read in (read_snapshot, read_about):
        with pytest.raises(DataError) as caught:
            read(snapshot)
        assert str(caught.value) == (
            f"{snapshot} has format {number}, which this version of ddp-hpc cannot read; use the version "
            "that wrote it, or another --snapshot-dir"
        )


class _Runs:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (str(self.path), 0o755)


def test_a_pickle_is_never_executed(snapshot: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    hostile = pickle.dumps(_Runs(ran))
    pickle.loads(hostile)  # it is a working exploit
    ran.rmdir()
    for name in ("model.pt", "optimizer.pkl", "__init__.py"):
        (snapshot / name).write_bytes(hostile)
    read_snapshot(snapshot)
    (snapshot / MODEL).write_bytes(hostile)
    about = _about(snapshot)
    entry = {"bytes": len(hostile), "sha256": hashlib.sha256(hostile).hexdigest()}
    _seal(snapshot, {**about, "files": {**about["files"], MODEL: entry}})  # type: ignore[dict-item]
    with pytest.raises(DamagedSnapshotError, match="is not a safetensors file"):
        read_snapshot(snapshot)
    assert not ran.exists()


def test_a_manifest_that_names_other_files_does_not_open_them(snapshot: Path) -> None:
    about = _about(snapshot)
    elsewhere = "../../../../../../etc/passwd"
    _seal(snapshot, {**about, "files": {elsewhere: {"bytes": 1, "sha256": "0" * 64}}})
    with pytest.raises(DamagedSnapshotError, match=f"has no entry for {TRAINING}"):
        read_snapshot(snapshot)
    _seal(snapshot, {**about, "files": {**about["files"], elsewhere: {}}})  # type: ignore[dict-item]
    read_snapshot(snapshot)


@pytest.mark.parametrize(
    "files",
    [
        None,
        [],
        "x",
        7,
        {},
        {MODEL: None},
        {MODEL: {}},
        {MODEL: {"bytes": 1}},
        {MODEL: {"bytes": "1", "sha256": 3}},
    ],
)
def test_an_invalid_list_of_files_is_damage(snapshot: Path, files: object) -> None:
    _seal(snapshot, {**_about(snapshot), "files": files})
    with pytest.raises(DamagedSnapshotError):
        read_snapshot(snapshot)


@pytest.mark.parametrize(
    "seeds", [range(200), pytest.param(range(200, 20_000), marks=pytest.mark.soak)], ids=["some", "many"]
)
def test_mutated_tensors_with_correct_checksums_are_read_or_are_damage(snapshot: Path, seeds: range) -> None:
    good = (snapshot / MODEL).read_bytes()
    about = _about(snapshot)
    for seed in seeds:
        chance = random.Random(seed)
        content = bytearray(good)
        for _ in range(chance.choice([1, 2, 5])):
            at = chance.randrange(2000)
            content[at : at + chance.randrange(3)] = chance.choice(
                [b"", b"9", b"-", b'"', chance.randbytes(2)]
            )
        (snapshot / MODEL).write_bytes(content)
        entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        _seal(snapshot, {**about, "files": {**about["files"], MODEL: entry}})  # type: ignore[dict-item]
        with suppress(DamagedSnapshotError):
            read_snapshot(snapshot)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        '"x"',
        "{}",
        '{"format": 1}',
        "[" * 100_000,
        "\x00" * 50,
        '{"format": 1e999}',
        '{"format": 1, "step": ' + "9" * 5000 + "}",
        "\ud83d",
    ],
)
def test_an_invalid_manifest_is_damage(snapshot: Path, text: str) -> None:
    (snapshot / MANIFEST).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(DamagedSnapshotError, match=MANIFEST):
        read_snapshot(snapshot)


def test_a_path_that_is_not_a_snapshot_is_reported(tmp_path: Path) -> None:
    (tmp_path / "step_00000001").write_text("a file")
    (tmp_path / "step_00000002").symlink_to("step_00000002")
    (tmp_path / "step_00000003").symlink_to("nowhere")
    (tmp_path / "step_12").mkdir()
    (tmp_path / "step_00000004.old").mkdir()
    found = find_snapshots(tmp_path)
    assert [path.name for path in found] == ["step_00000003", "step_00000002", "step_00000001"]
    for path in found:
        with pytest.raises(DdpHpcError, match=path.name):
            read_snapshot(path)


def test_a_file_or_a_link_loop_is_rejected_and_a_missing_directory_is_empty(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "loop"):
        with pytest.raises(DataError, match=f"cannot read the directory .*{name}"):
            find_snapshots(tmp_path / name)
    assert find_snapshots(tmp_path / "missing") == []


def test_a_failed_write_keeps_the_existing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = _write(tmp_path)
    before = {entry.name: entry.read_bytes() for entry in old.iterdir()}

    def refuse(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="No space left"):
            _write(tmp_path, seed=1)
    assert list(tmp_path.iterdir()) == [old]
    assert {entry.name: entry.read_bytes() for entry in old.iterdir()} == before
    new = _write(tmp_path, seed=1)
    assert new == old
    assert (new / MODEL).read_bytes() != before[MODEL]
