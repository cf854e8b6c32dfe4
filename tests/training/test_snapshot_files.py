"""One snapshot on disk: it is read as it was written or not at all, in any ranges, and executes no code."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from ddp_hpc.base.errors import DataError, DdpHpcError
from ddp_hpc.training.snapshots import snapshot_directory as directory_module
from ddp_hpc.training.snapshots import verified_file as verified_module
from ddp_hpc.training.snapshots.host_buffer import DTYPES
from ddp_hpc.training.snapshots.snapshot_files import (
    DamagedSnapshotError,
    _sealed,
    find_snapshots,
    read_about,
    read_snapshot,
)

from .shards import ranks_in, saved_whole

NUM_RANKS = 3
CHUNK_BYTES = 2**10
MANIFEST = "snapshot.json"
SHARD = "model-00001.safetensors"


def _tensors() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    model = {f"odd.{dtype}": (torch.randn(7, 5, generator=draw) * 50).to(dtype) for dtype in DTYPES}
    model |= {"big": torch.randn(50, 64, generator=draw), "cube": torch.randn(4, 6, 10, generator=draw)}
    model |= {
        "few": torch.randn(2, 3, generator=draw),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor(True),
        "\u00fc.name with spaces": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    training = {"optimizer.exp_avg/big": torch.randn(50, 64, generator=draw), "step": torch.tensor(12.0)}
    return model, training


MODEL, TRAINING = _tensors()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patched, ranks_in(folder, NUM_RANKS) as ranks:
        # With small chunks, each file has many of them.
        patched.setattr(directory_module, "CHUNK_BYTES", CHUNK_BYTES)
        ranks.save(7, MODEL, TRAINING)
        assert ranks.said == []
    return folder / "step_00000007"


@pytest.fixture
def snapshot(written: Path, tmp_path: Path) -> Path:
    """A copy of a valid snapshot, for tests that damage it."""
    return Path(shutil.copytree(written, tmp_path / written.name))


def _about(snapshot: Path) -> dict[str, Any]:
    about = json.loads((snapshot / MANIFEST).read_text())
    del about["sha256"]
    return dict(about)


def _seal(snapshot: Path, about: Mapping[str, Any]) -> None:
    """Writes a manifest with a correct checksum, like an attacker."""
    (snapshot / MANIFEST).write_bytes(_sealed(about))


def _bits(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        name: (tensor.dtype, tensor.shape, tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


def _read_all(path: Path) -> None:
    found = read_snapshot(path)
    for tensors in (found.model, found.training):
        assert all(tensor is not None for tensor in tensors.values())


def test_tensors_are_read_as_their_ranks_have_saved_them(written: Path) -> None:
    found = read_snapshot(written)
    assert _bits(found.model) == _bits(MODEL)
    assert _bits(found.training) == _bits(TRAINING)
    assert found.about["position"] == {"step": 7}
    assert find_snapshots(written.parent) == [written]


def test_tensors_are_read_as_rank_0_alone_has_saved_them(tmp_path: Path) -> None:
    path = saved_whole(tmp_path, 7, MODEL, TRAINING)
    found = read_snapshot(path)
    assert _bits(found.model) == _bits(MODEL)
    assert _bits(found.training) == _bits(TRAINING)
    assert _bits(safetensors.torch.load_file(path / "model-00000.safetensors")) == _bits(MODEL)


def test_each_file_is_a_safetensors_file_with_the_rows_of_one_rank(written: Path) -> None:
    files = [
        safetensors.torch.load_file(written / f"model-{rank:05d}.safetensors") for rank in range(NUM_RANKS)
    ]
    assert torch.equal(torch.cat([file["big"] for file in files]), MODEL["big"])
    assert ["few" in file for file in files] == [True, True, False]
    assert sorted(path.name for path in written.iterdir()) == [
        *(f"model-{rank:05d}.safetensors" for rank in range(NUM_RANKS)),
        "snapshot.json",
        *(f"training-{rank:05d}.safetensors" for rank in range(NUM_RANKS)),
    ]


def test_any_range_of_a_tensor_can_be_read(written: Path) -> None:
    stored = read_snapshot(written).model
    chance = random.Random(0)
    names = [name for name, tensor in MODEL.items() if tensor.numel() > 1 and not tensor.isnan().any()]
    for _ in range(500):
        name = chance.choice(names)
        begins = [chance.randrange(size) for size in MODEL[name].shape]
        sizes = [chance.randint(1, size - at) for size, at in zip(MODEL[name].shape, begins, strict=True)]
        box = tuple(slice(at, at + size) for at, size in zip(begins, sizes, strict=True))
        assert torch.equal(stored.read(name, tuple(begins), tuple(sizes)), MODEL[name][box]), (name, box)


def test_only_the_chunks_of_the_requested_rows_are_read(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    pread = os.pread

    def counting(fd: int, size: int, at: int) -> bytes:
        read.append(size)
        return pread(fd, size, at)

    stored = read_snapshot(written).training
    monkeypatch.setattr(verified_module.os, "pread", counting)
    stored.read("optimizer.exp_avg/big", (20, 0), (2, 64))
    assert [path.name for path in _open_files()] == ["training-00001.safetensors"]
    # The header, and two rows of 256 bytes.
    assert sum(read) <= 3 * CHUNK_BYTES
    stored.close()


def _open_files() -> list[Path]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of this directory
            found.append(entry.readlink())
    return [path for path in found if path.suffix == ".safetensors"]


def _damage(path: Path, chance: random.Random) -> str:
    """Changes one bit, or truncates, extends or removes a file."""
    kind = chance.choice(["flip"] * 5 + ["truncate", "extend", "remove"])
    content = bytearray(path.read_bytes())
    if kind == "flip":
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif kind == "truncate":
        del content[chance.randrange(len(content)) :]
    elif kind == "extend":
        content += b"\n"
    if kind == "remove":
        path.unlink()
    else:
        path.write_bytes(content)
    return kind


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 240), marks=pytest.mark.soak)])
def test_every_corruption_of_a_file_is_found(written: Path, tmp_path: Path, seeds: range) -> None:
    for seed in seeds:
        chance = random.Random(seed)
        damaged = Path(shutil.copytree(written, tmp_path / f"{seed}" / written.name))
        path = chance.choice(sorted(damaged.iterdir()))
        kind = _damage(path, chance)
        with pytest.raises(DamagedSnapshotError) as caught:
            _read_all(damaged)
        assert path.name in str(caught.value), (seed, kind)


def test_shards_of_two_snapshots_cannot_be_mixed(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "CHUNK_BYTES", CHUNK_BYTES)
    other = {name: tensor.clone() for name, tensor in MODEL.items()}
    other["big"][20, 0] += 1
    with ranks_in(tmp_path, NUM_RANKS) as ranks:
        ranks.save(8, other, TRAINING)
    shutil.copy(written / SHARD, tmp_path / "step_00000008")
    with pytest.raises(
        DamagedSnapshotError, match=r"model-00001\.safetensors: a SHA-256 checksum does not match"
    ):
        _read_all(tmp_path / "step_00000008")


@pytest.mark.parametrize("name", [MANIFEST, SHARD])
def test_a_directory_or_a_pipe_in_place_of_a_file_is_damage(snapshot: Path, name: str) -> None:
    for make in (Path.mkdir, os.mkfifo):
        path = snapshot / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)
        with pytest.raises(DamagedSnapshotError, match=name):
            _read_all(snapshot)


@pytest.mark.parametrize("number", [0, 2])
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
    _read_all(snapshot)
    (snapshot / SHARD).write_bytes(hostile)
    about = _about(snapshot)
    about["files"]["model"][1] = [len(hostile), len(hostile), hashlib.sha256(hostile).hexdigest()]
    _seal(snapshot, about)
    with pytest.raises(DamagedSnapshotError, match=f"{SHARD} has an invalid header"):
        _read_all(snapshot)
    assert not ran.exists()


_ODD = [-1, 0, 1, 3, 10**9, 2**63, 10**30, 1.5, "7", None, [], [0], {}, "../../etc/passwd", True, "\ud83d"]


def _changed(value: Any, chance: random.Random) -> Any:
    """Replaces one entry, at any depth, with a value that may be invalid."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.1:
        return chance.choice(_ODD)
    key = chance.choice(sorted(value)) if isinstance(value, dict) else chance.randrange(len(value))
    value[key] = _changed(value[key], chance)
    return value


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 5000), marks=pytest.mark.soak)])
def test_an_invalid_index_with_a_correct_checksum_is_damage_and_opens_no_other_file(
    snapshot: Path, seeds: range
) -> None:
    about = _about(snapshot)
    index = {key: about[key] for key in ("files", "tensors", "shards")}
    found = 0
    for seed in seeds:
        changed, chance = copy.deepcopy(index), random.Random(seed)
        key = chance.choice(sorted(changed))
        changed[key] = _changed(changed[key], chance)
        _seal(snapshot, {**about, **changed})
        try:
            _read_all(snapshot)
        except DamagedSnapshotError as error:
            found += 1
            assert str(snapshot) in str(error)  # noqa: PT017  # some changes are valid
    assert found > len(seeds) / 2


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 5000), marks=pytest.mark.soak)])
def test_an_invalid_header_with_a_correct_checksum_is_damage(snapshot: Path, seeds: range) -> None:
    path, about = snapshot / SHARD, _about(snapshot)
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header["__metadata__"]["places"] = json.loads(header["__metadata__"]["places"])
    for seed in seeds:
        changed = _changed(copy.deepcopy(header), random.Random(seed))
        if isinstance(changed, dict) and isinstance(more := changed.get("__metadata__"), dict):
            more["places"] = json.dumps(more.get("places"))
        text = json.dumps(changed).encode()
        text += b" " * (begin - 8 - len(text))
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[begin:])
        about["files"]["model"][1] = [
            path.stat().st_size, begin, hashlib.sha256(path.read_bytes()[:begin]).hexdigest()
        ]  # fmt: skip
        _seal(snapshot, about)
        try:
            _read_all(snapshot)
        except DamagedSnapshotError as error:
            assert str(snapshot) in str(error)  # noqa: PT017  # some changes are valid


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
