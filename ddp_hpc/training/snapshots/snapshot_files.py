"""Reads and writes snapshots: directories that are complete or absent, with checksums of their files.

    step_00000120/snapshot.json            description; size and SHA-256 of the other files
                  model.safetensors        parameters and buffers, by the names of the bare model
                  training.safetensors     optimizer and random number generators

`sha256sum` prints the same checksums. `shard_index` describes the files of a sharded snapshot. A snapshot
cannot contain code: ddp-hpc opens only the files that are described here and there, and they contain only
JSON, checksums and tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_hpc.base.atomic_files import sync_to_disk
from ddp_hpc.base.errors import DataError
from ddp_hpc.base.option_names import named
from ddp_hpc.training.snapshots.host_buffer import FileBuffer, Specs, specs_of
from ddp_hpc.training.snapshots.shard_file import SECTIONS, write_hashed
from ddp_hpc.training.snapshots.shard_index import ShardIndex
from ddp_hpc.training.snapshots.stored_tensors import StoredTensors
from ddp_hpc.training.snapshots.verified_file import DamagedSnapshotError, open_regular

FORMAT, SHARDED_FORMAT = 1, 3
MODEL, TRAINING = "model.safetensors", "training.safetensors"
_MANIFEST = "snapshot.json"
_NAME = re.compile(r"step_(\d{8,})")
# Size limit of a manifest.
_MAX_MANIFEST_BYTES = 2**30


@dataclass(frozen=True)
class Snapshot:
    """A snapshot: either its tensors with correct checksums, or StoredTensors, which are read when needed."""

    path: Path
    about: dict[str, Any]
    """The description of the run, and `format`."""
    model: Mapping[str, Tensor]
    training: Mapping[str, Tensor]

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks have written one file each."""
        return isinstance(self.model, StoredTensors)


def specs_of_saved(tensors: Mapping[str, Tensor]) -> Specs:
    """Returns shape and type of each tensor of a snapshot, without reading them."""
    return tensors.specs if isinstance(tensors, StoredTensors) else specs_of(tensors)


def snapshot_name(step: int) -> str:
    """Returns the name of a snapshot, such as `step_00000120`."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Returns the step in the directory's name; -1 if the name has another form."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def find_snapshots(directory: Path) -> list[Path]:
    """Returns the snapshots in `directory`, the newest first; none if the directory does not exist.

    Raises:
        DataError: `directory` is not a directory, or cannot be read.
    """
    try:
        found = [entry for entry in directory.iterdir() if _NAME.fullmatch(entry.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(
            f"cannot read the directory {directory}; use another {named('snapshot_dir')}"
        ) from error
    return sorted(found, key=step_of, reverse=True)


def partial_directory(directory: Path, step: int, token: str) -> Path:
    """Returns the directory in which a snapshot is written; `token` is the same on all ranks of the run."""
    return directory / f".{snapshot_name(step)}.{token}.partial"


def write_snapshot(
    directory: Path, step: int, about: Mapping[str, Any], files: Mapping[str, FileBuffer]
) -> Path:
    """Writes the snapshot `directory/step_N` of whole tensors, as `complete_snapshot`."""
    partial = partial_directory(directory, step, str(os.getpid()))
    shutil.rmtree(partial, ignore_errors=True)
    try:
        entries = write_files(partial, files)
        return complete_snapshot(partial, directory, step, {"format": FORMAT, **about, "files": entries})
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_files(partial: Path, files: Mapping[str, FileBuffer]) -> dict[str, dict[str, Any]]:
    """Writes the files of a snapshot into `partial`, and returns their sizes and checksums.

    Files of an earlier attempt are replaced.

    Raises:
        OSError: an error of the file system.
    """
    partial.mkdir(exist_ok=True)
    entries = {}
    for name, buffer in files.items():
        buffer.wait()
        contents = [part.numpy().data for part in buffer.parts]
        entries[name] = {"bytes": buffer.num_bytes, "sha256": _write_file(partial / name, contents)}
    return entries


def complete_snapshot(
    partial: Path,
    directory: Path,
    step: int,
    about: Mapping[str, Any],
    more: Mapping[str, bytes] | None = None,
) -> Path:
    """Renames `partial` to `directory/step_N` after all of it, and the manifest `about`, are on the disk.

    `more` contains the contents of additional files by name. An existing snapshot of that name is replaced:
    it was damaged, or the run resumed from an earlier one.

    Raises:
        OSError: an error of the file system; existing files are unchanged.
    """
    target = directory / snapshot_name(step)
    for name, content in {**(more or {}), _MANIFEST: _sealed(about)}.items():
        _write_file(partial / name, [memoryview(content)])
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
    """Reads the snapshot at `path`, or only its description if it is sharded.

    The parsed bytes are the same as those whose checksum is verified. Without `checks_sizes`, the sizes of
    the files of a sharded snapshot are checked only when they are read: if one rank has checked all of them,
    the others do not have to.

    Raises:
        DamagedSnapshotError: it is damaged.
        DataError: it has a format that this version cannot read, or is not a snapshot.
    """
    about = read_about(path)
    if about["format"] == SHARDED_FORMAT:
        stored = [StoredTensors(ShardIndex(path, about, section)) for section in SECTIONS]
        for tensors in stored if checks_sizes else ():
            tensors.check_sizes()
        return Snapshot(path, about, *stored)
    # Read the larger file first, because its buffer is freed before the other file is read.
    training = _read_tensors(path, TRAINING, about)
    return Snapshot(path, about, _read_tensors(path, MODEL, about), training)


def _read_tensors(path: Path, name: str, about: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        num_bytes, sha256 = about["files"][name]["bytes"], about["files"][name]["sha256"]
        with open_regular(path / name) as file:
            found_bytes = os.fstat(file.fileno()).st_size
            content = file.read() if found_bytes == num_bytes else b""
    except (KeyError, TypeError) as error:
        raise DamagedSnapshotError(f"{path / _MANIFEST} has no entry for {name}") from error
    except OSError as error:
        raise DamagedSnapshotError(f"{path / name}: cannot be read") from error
    if found_bytes != num_bytes:
        raise DamagedSnapshotError(f"{path / name} has {found_bytes} bytes instead of {num_bytes}")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DamagedSnapshotError(f"{path / name}: the SHA-256 checksum does not match")
    import safetensors.torch  # only when a snapshot is read

    try:
        return safetensors.torch.load(content)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedSnapshotError(f"{path / name} is not a safetensors file") from error


def read_named(path: Path) -> Snapshot:
    """Reads a snapshot given by the user: a directory such as step_00000120, or the newest in a directory.

    Raises:
        DamagedSnapshotError: it is damaged; the message names the previous snapshot.
        DataError: it has a format that this version cannot read, or there is no snapshot.
    """
    if step_of(path) < 0:
        found = find_snapshots(path)
        if not found:
            raise DataError(
                f"no snapshots in {path}; give a snapshot, such as step_00000120, or a directory of snapshots"
            )
        path = found[0]
    with naming_the_previous(path):
        return read_snapshot(path)


@contextmanager
def naming_the_previous(path: Path) -> Iterator[None]:
    """Adds the name of the previous snapshot to the error, if the block finds that this one is damaged."""
    try:
        yield
    except DamagedSnapshotError as error:
        others = [other for other in find_snapshots(path.parent) if step_of(other) < step_of(path)]
        raise DamagedSnapshotError(
            f"{error}; the previous snapshot is {others[0]}" if others else f"{error}"
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
    if about.get("format") not in (FORMAT, SHARDED_FORMAT):
        raise DataError(
            f"{path} has format {about.get('format')}, which this version of ddp-hpc cannot read; use the "
            f"version that wrote it, or another {named('snapshot_dir')}"
        )
    _check_name(path, about.get("position"))
    return dict(about)


def _check_name(path: Path, position: object) -> None:
    step = position.get("step") if isinstance(position, dict) else None
    if isinstance(step, int) and step_of(path) not in (-1, step):
        raise DamagedSnapshotError(
            f"{path} contains the snapshot of step {step}, so it was renamed or copied; rename it to "
            f"{snapshot_name(step)}"
        )


def _sealed(about: Mapping[str, Any]) -> bytes:
    """Returns the bytes of the manifest, with a checksum of all other entries in `sha256`."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    # The index of a sharded snapshot would have a line for each number.
    indent = 1 if about.get("format") == FORMAT else None
    return (json.dumps({**about, "sha256": digest}, indent=indent, sort_keys=True) + "\n").encode()


def _write_file(path: Path, contents: Iterable[memoryview]) -> str:
    """Writes and syncs a file, which replaces that of an earlier attempt; returns its checksum."""
    path.unlink(missing_ok=True)
    with path.open("xb", buffering=0) as file:
        [digest] = write_hashed(file, contents, None)
        os.fsync(file.fileno())
    return digest
