"""A snapshot to which each rank has written its shards: complete, verified, and readable in any ranges."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import random
import shutil
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from ddp_hpc.training.snapshots import snapshot_directory as directory_module
from ddp_hpc.training.snapshots import verified_file as verified_module
from ddp_hpc.training.snapshots.checksum_tree import tree_of
from ddp_hpc.training.snapshots.host_buffer import DTYPES
from ddp_hpc.training.snapshots.shard_file import write_shards as write_really
from ddp_hpc.training.snapshots.snapshot_files import DamagedSnapshotError, _sealed, read_snapshot
from ddp_hpc.training.snapshots.stored_tensors import StoredTensors

from .shards import Ranks, ranks_in

NUM_RANKS = 3
CHUNK_BYTES = 2**10


def _tensors() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    model = {f"odd.{dtype}": (torch.randn(7, 5, generator=draw) * 50).to(dtype) for dtype in DTYPES}
    model |= {"big": torch.randn(50, 64, generator=draw), "cube": torch.randn(4, 6, 10, generator=draw)}
    model |= {
        "few": torch.randn(2, 3, generator=draw),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor(True),
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


def _read_all(path: Path) -> None:
    found = read_snapshot(path)
    for tensors in (found.model, found.training):
        assert all(tensor is not None for tensor in tensors.values())


def test_whole_tensors_are_read_as_they_were_saved(written: Path) -> None:
    found = read_snapshot(written)
    assert found.about["format"] == 3
    for theirs, ours in ((found.model, MODEL), (found.training, TRAINING)):
        assert set(theirs) == set(ours)
        for name, tensor in ours.items():
            assert theirs[name].dtype == tensor.dtype
            assert theirs[name].shape == tensor.shape
            assert torch.equal(theirs[name], tensor), name


def test_each_file_is_a_safetensors_file_with_the_rows_of_one_rank(written: Path) -> None:
    files = [
        safetensors.torch.load_file(written / f"model-{rank:05d}.safetensors") for rank in range(NUM_RANKS)
    ]
    assert torch.equal(torch.cat([file["big"] for file in files]), MODEL["big"])
    assert ["few" in file for file in files] == [True, True, False]
    assert sorted(path.name for path in written.iterdir()) == [
        "checksums.bin",
        *(f"model-{rank:05d}.safetensors" for rank in range(NUM_RANKS)),
        "snapshot.json",
        *(f"training-{rank:05d}.safetensors" for rank in range(NUM_RANKS)),
    ]


def test_any_range_of_a_tensor_can_be_read(written: Path) -> None:
    stored = read_snapshot(written).model
    assert isinstance(stored, StoredTensors)
    chance = random.Random(0)
    names = [name for name, tensor in MODEL.items() if tensor.numel() > 1]
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
    assert isinstance(stored, StoredTensors)
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
    shutil.copy(written / "model-00001.safetensors", tmp_path / "step_00000008")
    with pytest.raises(
        DamagedSnapshotError, match=r"model-00001\.safetensors: a SHA-256 checksum does not match"
    ):
        _read_all(tmp_path / "step_00000008")


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
    written: Path, tmp_path: Path, seeds: range
) -> None:
    snapshot = Path(shutil.copytree(written, tmp_path / "step_00000007"))
    about = json.loads((snapshot / "snapshot.json").read_text())
    index = {key: about[key] for key in ("ranks", "checksums", "tensors", "shards")}
    found = 0
    for seed in seeds:
        changed, chance = copy.deepcopy(index), random.Random(seed)
        key = chance.choice(sorted(changed))
        changed[key] = _changed(changed[key], chance)
        (snapshot / "snapshot.json").write_bytes(_sealed({"format": about["format"], **changed}))
        try:
            _read_all(snapshot)
        except DamagedSnapshotError as error:
            found += 1
            assert str(snapshot) in str(error)  # noqa: PT017  # some changes are valid
    assert found > len(seeds) / 2


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 5000), marks=pytest.mark.soak)])
def test_an_invalid_header_with_a_correct_checksum_is_damage(
    snapshot: Path, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = snapshot / "model-00001.safetensors"
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header["__metadata__"]["splits"] = json.loads(header["__metadata__"]["splits"])
    for seed in seeds:
        changed = _changed(copy.deepcopy(header), random.Random(seed))
        if isinstance(changed, dict) and isinstance(more := changed.get("__metadata__"), dict):
            more["splits"] = json.dumps(more.get("splits"))
        text = json.dumps(changed).encode()
        text += b" " * (begin - 8 - len(text))
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[begin:])
        _reseal(snapshot)
        try:
            _read_all(snapshot)
        except DamagedSnapshotError as error:
            assert str(snapshot) in str(error)  # noqa: PT017  # some changes are valid


def _reseal(snapshot: Path) -> None:
    """Writes correct checksums of all headers, as an attacker could."""
    records = b""
    for rank in range(NUM_RANKS):
        for section in ("model", "training"):
            content = (snapshot / f"{section}-{rank:05d}.safetensors").read_bytes()
            begin = 8 + int.from_bytes(content[:8], "little")
            records += struct.pack("<QQ", len(content), begin) + hashlib.sha256(content[:begin]).digest()
    content, root = tree_of(records)
    (snapshot / "checksums.bin").write_bytes(content)
    about = json.loads((snapshot / "snapshot.json").read_text())
    del about["sha256"]
    (snapshot / "snapshot.json").write_bytes(_sealed({**about, "checksums": root}))


def test_a_rank_that_cannot_write_is_a_warning_and_the_next_snapshot_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_on_rank_1(path: Path, *rest: Any) -> Any:
        if "-00001" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_really(path, *rest)

    with ranks_in(tmp_path, NUM_RANKS) as ranks:
        ranks.save(1, MODEL, TRAINING)
        with monkeypatch.context() as patched:
            patched.setattr(directory_module, "write_shards", full_on_rank_1)
            ranks.save(2, MODEL, TRAINING)
        [line] = ranks.said
        assert line == (
            f"WARNING: the snapshot of step 2 was NOT saved in {tmp_path}: No space left on device (rank 1); "
            "the newest snapshot is still from step 1. Training continues; free disk space"
        )
        assert [writer.saved.step for writer in ranks.writers] == [1] * NUM_RANKS
        assert _entries(tmp_path) == ["step_00000001"]
        ranks.save(3, MODEL, TRAINING)
        assert _entries(tmp_path) == ["step_00000001", "step_00000003"]
        assert len(ranks.said) == 1


def _entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_an_unexpected_error_of_one_rank_does_not_make_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_on_rank_2(path: Path, *rest: Any) -> Any:
        if "-00002" in path.name:
            raise RuntimeError("a defect")
        return write_really(path, *rest)

    monkeypatch.setattr(directory_module, "write_shards", broken_on_rank_2)
    with ranks_in(tmp_path, NUM_RANKS) as ranks:
        ranks.save(1, MODEL, TRAINING)
        [line] = ranks.said
        assert "NOT saved" in line
        assert "RuntimeError: a defect (rank 2); there is no snapshot yet" in line
        assert _entries(tmp_path) == []


def test_ranks_that_do_not_write_are_named_after_a_limit(tmp_path: Path) -> None:
    with ranks_in(tmp_path, NUM_RANKS, limit_s=0.2) as ranks:
        ranks.save(1, MODEL, TRAINING, absent=(1,))
        [line] = ranks.said
        assert "rank 1 did not write its part within 0.2 s; there is no snapshot yet" in line
        assert _entries(tmp_path) == []
        ranks.save(2, MODEL, TRAINING)
        assert _entries(tmp_path) == ["step_00000002"]


def test_a_rank_that_reports_late_does_not_disturb_the_next_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def late_on_rank_1(path: Path, *rest: Any) -> Any:
        if "-00001" in path.name:
            assert go.wait(10)
        return write_really(path, *rest)

    monkeypatch.setattr(directory_module, "write_shards", late_on_rank_1)
    with ranks_in(tmp_path, NUM_RANKS, limit_s=0.2) as ranks:
        threading.Timer(1.0, go.set).start()
        ranks.save(1, MODEL, TRAINING)
        ranks.save(2, MODEL, TRAINING)
        assert len(ranks.said) == 1
        assert "step_00000002" in _entries(tmp_path)
    _read_all(tmp_path / "step_00000002")


def test_the_end_of_the_store_ends_the_writing_threads(tmp_path: Path) -> None:
    with ranks_in(tmp_path, NUM_RANKS, limit_s=1000.0) as ranks:
        _lose_the_store(ranks)
        ranks.save(1, MODEL, TRAINING, absent=(1,))
        [line] = ranks.said
        assert "the snapshot of step 1 was NOT saved" in line
        assert _entries(tmp_path) == []


def _lose_the_store(ranks: Ranks) -> None:
    def lose() -> None:
        for writer in ranks.writers:
            assert writer.joint is not None
            writer.joint.store.close()

    threading.Timer(0.3, lose).start()


def test_files_that_rank_0_does_not_see_are_reported(tmp_path: Path) -> None:
    elsewhere = tmp_path / "node1"
    elsewhere.mkdir()
    with ranks_in(tmp_path / "node0", 2) as ranks:
        ranks.writers[1].path = elsewhere
        ranks.save(1, MODEL, TRAINING)
        [line] = ranks.said
        assert "rank 0 does not see the files of rank 1" in line
        assert line.endswith("use another --snapshot-dir")
        assert _entries(tmp_path / "node0") == []


def test_old_snapshots_are_deleted_with_all_their_shards(tmp_path: Path) -> None:
    with ranks_in(tmp_path, 2, keep=2) as ranks:
        for step in (1, 2, 3):
            ranks.save(step, MODEL, TRAINING)
        assert _entries(tmp_path) == ["step_00000002", "step_00000003"]
        newest = ranks.first.newest_valid()
        assert newest is not None
        assert newest.path.name == "step_00000003"
