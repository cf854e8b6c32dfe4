"""Completes and reads snapshots: directories that are complete or absent, with checksums of their files.

    step_00000120/snapshot.json                description; how the tensors are divided; checksums
                  model-00000.safetensors      the parameters and buffers that rank 0 has written
                  training-00000.safetensors   optimizer and random number generators
                  model-00001.safetensors      if the state is sharded, the shards of rank 1, and so on

`shard_index` describes the files. A snapshot cannot contain code: ddp-hpc opens only the files that are
described there, and they contain only JSON, checksums and tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.base.atomic_files import sync_to_disk
from ddp_hpc.base.errors import DataError
from ddp_hpc.training.snapshots.shard_file import SECTIONS
from ddp_hpc.training.snapshots.shard_index import ShardIndex
from ddp_hpc.training.snapshots.stored_tensors import StoredTensors
from ddp_hpc.training.snapshots.verified_file import DamagedSnapshotError, open_regular

FORMAT = 1
_MANIFEST = "snapshot.json"
_NAME = re.compile(r"step_(\d{8,})")
# Size limit of a manifest.
_MAX_MANIFEST_BYTES = 2**30


@dataclass(frozen=True)
class Snapshot:
    """A snapshot, whose tensors are read when they are needed."""

    path: Path
    about: dict[str, Any]
    """The description of the run, and the index of the files."""
    model: StoredTensors
    training: StoredTensors


def snapshot_name(step: int) -> str:
    """Returns the name of a snapshot, such as `step_00000120`."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Returns the step in the name of a snapshot's directory."""
    return int(path.name.removeprefix("step_"))


def find_snapshots(directory: Path) -> list[Path]:
    """Returns the snapshots in `directory`, the newest first; none if the directory does not exist.

    Raises:
        DataError: `directory` is not a directory, or cannot be read.
    """
    try:
        snapshots = [entry for entry in directory.iterdir() if _is_name(entry)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"cannot read the directory {directory}; use another --snapshot-dir") from error
    return sorted(snapshots, key=step_of, reverse=True)


def _is_name(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None


def partial_directory(directory: Path, step: int, token: str) -> Path:
    """Returns the directory in which a snapshot is written; `token` is the same on all ranks of the run."""
    return directory / f".{snapshot_name(step)}.{token}.partial"


def complete_snapshot(partial: Path, directory: Path, step: int, about: Mapping[str, Any]) -> Path:
    """Renames `partial` to `directory/step_N` after all of it, and the manifest `about`, are on the disk.

    An existing snapshot of that name is replaced: it was damaged, or the run resumed from an earlier one.

    Raises:
        OSError: an error of the file system; existing files are unchanged.
    """
    target = directory / snapshot_name(step)
    with (partial / _MANIFEST).open("wb") as file:
        file.write(_sealed({"format": FORMAT, **about}))
        file.flush()
        os.fsync(file.fileno())
    sync_to_disk(partial)
    discard(target)
    partial.rename(target)
    sync_to_disk(directory)
    return target


def discard(path: Path) -> None:
    """Removes a snapshot atomically. Does nothing if it does not exist."""
    removed = path.with_name(f".{path.name}.{os.getpid()}.removed")
    with suppress(FileNotFoundError):
        path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Removes the partial files of a killed writer. The caller must hold the directory's lock."""
    for entry in directory.glob(".step_*"):
        if entry.suffix in (".partial", ".removed"):
            shutil.rmtree(entry, ignore_errors=True)


def read_snapshot(path: Path, *, checks_sizes: bool = True) -> Snapshot:
    """Reads the description of the snapshot at `path`.

    Without `checks_sizes`, the sizes of the files are checked only when they are read: if one rank has
    checked all of them, the others do not have to.

    Raises:
        DamagedSnapshotError: it is damaged.
        DataError: it has a format that this version cannot read, or is not a snapshot.
    """
    about = read_about(path)
    model, training = (StoredTensors(ShardIndex(path, about, section)) for section in SECTIONS)
    for tensors in (model, training) if checks_sizes else ():
        tensors.check_sizes()
    return Snapshot(path, about, model, training)


def read_named(path: Path) -> Snapshot:
    """Reads a snapshot given by the user: a directory such as step_00000120, or the newest in a directory.

    Raises:
        DamagedSnapshotError: it is damaged; the message names the previous snapshot.
        DataError: it has a format that this version cannot read, or there is no snapshot.
    """
    if not _is_name(path):
        snapshots = find_snapshots(path)
        if not snapshots:
            raise DataError(
                f"no snapshots in {path}; give a snapshot, such as step_00000120, or a directory of snapshots"
            )
        path = snapshots[0]
    with naming_the_previous(path):
        return read_snapshot(path)


@contextmanager
def naming_the_previous(path: Path) -> Iterator[None]:
    """Adds the name of the previous snapshot to the error, if the block finds that this one is damaged."""
    try:
        yield
    except DamagedSnapshotError as error:
        earlier = [other for other in find_snapshots(path.parent) if step_of(other) < step_of(path)]
        raise DamagedSnapshotError(
            f"{error}; the previous snapshot is {earlier[0]}" if earlier else f"{error}"
        ) from error


def read_about(path: Path) -> dict[str, Any]:
    """Reads the description of the snapshot, without its tensors.

    Raises:
        DamagedSnapshotError: it is damaged.
        DataError: it has a format that this version cannot read, or is not a snapshot.
    """
    if not path.is_dir():
        raise DataError(f"{path} is not a snapshot; give a directory such as {snapshot_name(120)}")
    try:
        with open_regular(path / _MANIFEST) as file:
            text = file.read(_MAX_MANIFEST_BYTES)
    except OSError as error:
        raise DamagedSnapshotError(f"{path / _MANIFEST}: cannot be read") from error
    try:
        about = json.loads(text)
        sealed = _sealed({key: value for key, value in about.items() if key != "sha256"}) == text
    except (ValueError, AttributeError, RecursionError) as error:
        raise DamagedSnapshotError(f"{path / _MANIFEST} is not valid JSON") from error
    if not sealed:
        raise DamagedSnapshotError(f"{path / _MANIFEST}: the SHA-256 checksum does not match")
    if about.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {about.get('format')}, which this version of ddp-hpc cannot read; use the "
            "version that wrote it, or another --snapshot-dir"
        )
    _check_name(path, about.get("position"))
    return dict(about)


def _check_name(path: Path, position: object) -> None:
    step = position.get("step") if isinstance(position, dict) else None
    if isinstance(step, int) and _is_name(path) and step_of(path) != step:
        raise DamagedSnapshotError(
            f"{path} contains the snapshot of step {step}, so it was renamed or copied; rename it to "
            f"{snapshot_name(step)}"
        )


def _sealed(about: Mapping[str, Any]) -> bytes:
    """Returns the bytes of the manifest, with a checksum of all other entries in `sha256`."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**about, "sha256": digest}, sort_keys=True) + "\n").encode()
