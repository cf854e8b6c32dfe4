"""One snapshot: a folder that is complete or not there, and that says itself whether it is whole.

    step_00000120/snapshot.json            what it is, and size and SHA-256 of each of the others
                  model.safetensors        parameters and buffers, by the names of the bare model
                  training.safetensors     optimizer and random number generators

Nothing in it can carry code: JSON and safetensors are read, and no file is opened that
is not named here. `sha256sum` gives the same sums.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
from torch import Tensor

from ddp_hpc.errors import DataError, DdpHpcError
from ddp_hpc.training.image import FileImage

FORMAT = 1
MODEL, TRAINING = "model.safetensors", "training.safetensors"
_MANIFEST = "snapshot.json"
_NAME = re.compile(r"step_(\d{8,})")
_CHUNK_BYTES = 16 * 2**20
# A manifest of ours has a few kilobytes.
_MAX_MANIFEST_BYTES = 2**24


class DamagedSnapshotError(DdpHpcError):
    """The snapshot is not what was written: cut off, changed, or unreadable."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that was read whole, and whose checksums were right."""

    path: Path
    about: dict[str, Any]
    """What `write_snapshot` was given, and `format`."""
    model: dict[str, Tensor]
    training: dict[str, Tensor]


def snapshot_name(step: int) -> str:
    """`step_00000120`."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step that the folder's name tells."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def find_snapshots(folder: Path) -> list[Path]:
    """The snapshots in `folder` by their names, the newest first; none where there is no such folder.

    Raises:
        DataError: it is no folder, or cannot be read.
    """
    try:
        found = [entry for entry in folder.iterdir() if _NAME.fullmatch(entry.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{folder}: is no folder that can be read; name another --snapshot-dir") from error
    return sorted(found, key=step_of, reverse=True)


def write_snapshot(folder: Path, step: int, about: Mapping[str, Any], files: Mapping[str, FileImage]) -> Path:
    """Writes `folder/step_N`: it has that name once all of it is on the disk.

    One of that name that is there already is replaced: it was found damaged, or the run
    went back behind it.

    Raises:
        OSError: the file system refuses; what there was before is as it was.
    """
    target = folder / snapshot_name(step)
    partial = folder / f".{target.name}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        entries = {
            name: _write_file(partial / name, image.bytes.numpy().data) for name, image in files.items()
        }
        _write_file(partial / _MANIFEST, memoryview(_sealed({"format": FORMAT, **about, "files": entries})))
        _sync(partial)
        discard(target)
        partial.rename(target)
        _sync(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def discard(path: Path) -> None:
    """Removes a snapshot so that no half of it is ever found under its name; nothing there is fine."""
    doomed = path.with_name(f".{path.name}.{os.getpid()}.removed")
    with suppress(FileNotFoundError):
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes what a killed writer or remover left. Only for the holder of the folder's lock."""
    for entry in folder.glob(".step_*"):
        if entry.suffix in (".partial", ".removed"):
            shutil.rmtree(entry, ignore_errors=True)


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot at `path`; what is parsed are the very bytes whose checksum was right.

    Raises:
        DamagedSnapshotError: it is not what was written.
        DataError: it is of a newer version of this package, or no snapshot at all.
    """
    about = read_about(path)
    tensors = {}
    for name in (MODEL, TRAINING):
        try:
            num_bytes, sha256 = about["files"][name]["bytes"], about["files"][name]["sha256"]
            with _opened(path / name) as file:
                found_bytes = os.fstat(file.fileno()).st_size
                content = file.read() if found_bytes == num_bytes else b""
        except (KeyError, TypeError) as error:
            raise DamagedSnapshotError(f"{path / _MANIFEST}: does not tell of {name}") from error
        except OSError as error:
            raise DamagedSnapshotError(f"{path / name}: cannot be read") from error
        if found_bytes != num_bytes:
            raise DamagedSnapshotError(f"{path / name}: has {found_bytes} bytes, {num_bytes} were written")
        if hashlib.sha256(content).hexdigest() != sha256:
            raise DamagedSnapshotError(f"{path / name}: its SHA-256 is not the one that was written")
        try:
            tensors[name] = safetensors.torch.load(content)
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise DamagedSnapshotError(f"{path / name}: is no safetensors file") from error
    return Snapshot(path, about, tensors[MODEL], tensors[TRAINING])


def read_named(path: Path) -> Snapshot:
    """The snapshot that a user names: a folder such as step_00000120, or the newest in a folder of them.

    Raises:
        DamagedSnapshotError: it is not what was written; the one before it is named.
        DataError: it is of a newer version of this package, or no snapshot is there.
    """
    if step_of(path) < 0:
        found = find_snapshots(path)
        if not found:
            raise DataError(f"{path}: no snapshot is there; name a folder with some such as step_00000120")
        path = found[0]
    try:
        return read_snapshot(path)
    except DamagedSnapshotError as error:
        others = [other for other in find_snapshots(path.parent) if step_of(other) < step_of(path)]
        raise DamagedSnapshotError(
            f"{error}; the one before is {others[0]}" if others else f"{error}"
        ) from error


def read_about(path: Path) -> dict[str, Any]:
    """What the snapshot says of itself, without its tensors.

    Raises:
        DamagedSnapshotError: it is not what was written.
        DataError: it is of a newer version of this package, or no snapshot at all.
    """
    if not path.is_dir():
        raise DataError(f"{path}: is no snapshot; a folder such as {snapshot_name(120)} is needed")
    try:
        with _opened(path / _MANIFEST) as file:
            text = file.read(_MAX_MANIFEST_BYTES)
    except OSError as error:
        raise DamagedSnapshotError(f"{path / _MANIFEST}: cannot be read") from error
    try:
        about = json.loads(text)
        sealed = _sealed({key: value for key, value in about.items() if key != "sha256"}) == text
    except (ValueError, AttributeError, RecursionError) as error:
        raise DamagedSnapshotError(f"{path / _MANIFEST}: is not the JSON that was written") from error
    if not sealed:
        raise DamagedSnapshotError(f"{path / _MANIFEST}: its SHA-256 is not the one that was written")
    if about.get("format") != FORMAT:
        raise DataError(
            f"{path}: is of format {about.get('format')} and this ddp-hpc reads format {FORMAT}; "
            "update ddp-hpc, or name another --snapshot-dir"
        )
    return dict(about)


def _sealed(about: Mapping[str, Any]) -> bytes:
    """The manifest's bytes, in which `sha256` stands for all the rest."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**about, "sha256": digest}, indent=1, sort_keys=True) + "\n").encode()


def _write_file(path: Path, content: memoryview) -> dict[str, Any]:
    """Writes and syncs; gives its size and checksum."""
    digest = hashlib.sha256()
    with path.open("xb", buffering=0) as file:
        begin = 0
        while begin < len(content):
            # What is hashed lies in the cache when it is written. A full disk may take a part.
            chunk = content[begin : begin + _CHUNK_BYTES]
            written = file.write(chunk)
            digest.update(chunk[:written])
            begin += written
        os.fsync(file.fileno())
    return {"bytes": len(content), "sha256": digest.hexdigest()}


def _opened(path: Path) -> BinaryIO:
    """The file for reading. A pipe of that name would be waited for, and a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no file")
    return path.open("rb")


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
