"""Reads tensors of a snapshot, or parts of them, from the bytes whose checksums were verified.

Only the chunks that contain the requested values are read, and the beginning of each file that is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from ddp_hpc.training.snapshots.host_buffer import Specs
from ddp_hpc.training.snapshots.shard_index import Part, ShardIndex
from ddp_hpc.training.snapshots.verified_file import DamagedSnapshotError, VerifiedFile

# The most bytes of a part that are in memory in addition to the result.
_BAND_BYTES = 32 * 2**20
# Open files, each with one chunk in memory.
_MOST_OPEN = 8


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of one section of a snapshot. A tensor is read each time it is accessed.

    Raises:
        DamagedSnapshotError: by every access, if a file is missing or has the wrong size, or if a checksum
            does not match.
    """

    def __init__(self, index: ShardIndex) -> None:
        self._index = index
        self._specs = index.specs
        self._open: dict[str, VerifiedFile] = {}

    @property
    def specs(self) -> Specs:
        """Shape and type of each tensor."""
        return self._specs

    def __getitem__(self, name: str) -> Tensor:
        shape = self.specs[name][0]
        return self.read(name, (0,) * len(shape), shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Reads the rectangular part of a tensor that begins at `offset`."""
        stops = tuple(at + size for at, size in zip(offset, shape, strict=True))
        # `parts` compares the index with the sizes of the files. It is called before memory is
        # allocated, because a damaged index can contain any size.
        parts = list(self._index.parts(name, offset, stops)) if prod(shape) else []
        result, num_values = torch.zeros(shape, dtype=self.specs[name][1]), 0
        for part in parts:
            begins = [max(mine, theirs) for mine, theirs in zip(offset, part.offset, strict=True)]
            ends = [
                min(stop, theirs + of_part)
                for stop, theirs, of_part in zip(stops, part.offset, part.shape, strict=True)
            ]
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                target = result[
                    tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, offset, strict=True))
                ]
                box = [slice(b - o, e - o) for b, e, o in zip(begins, ends, part.offset, strict=True)]
                self._copy(part, box, target)
                num_values += target.numel()
        if num_values != prod(shape):
            raise DamagedSnapshotError(f"{self._index.path} does not contain all values of {name}")
        return result

    def check_sizes(self) -> None:
        """Raises DamagedSnapshotError if a file of this section is missing or has another size."""
        self._index.check_sizes()

    def close(self) -> None:
        """Closes the open files, which the next access opens again."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _copy(self, part: Part, box: list[slice], target: Tensor) -> None:
        """Copies the box of a part to `target`, a band of rows at a time."""
        reader, dtype = self._reader(part.file), target.dtype
        if not part.shape:
            target.copy_(reader.read(part.begin, dtype.itemsize).view(dtype).reshape(()))
            return
        rows, row_shape = box[0], part.shape[1:]
        row_bytes = prod(row_shape) * dtype.itemsize
        step = max(1, _BAND_BYTES // max(1, row_bytes))
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            content = reader.read(part.begin + first * row_bytes, (last - first) * row_bytes)
            band = content.view(dtype).reshape(last - first, *row_shape)
            target[first - rows.start : last - rows.start].copy_(band[(slice(None), *box[1:])])

    def _reader(self, name: str) -> VerifiedFile:
        if name not in self._open:
            stored = self._index.file(name)
            if len(self._open) == _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[name] = VerifiedFile(self._index.path / name, stored)
        return self._open[name]
