"""A file of records that can be read and verified in parts: a tree of SHA-256 checksums.

The file contains the records, then one checksum of each block of them, then one checksum of each block of
these checksums, and so on until one block is left. The checksum of that block is stored elsewhere. To verify
a record, a reader needs only one block of each level.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ddp_hpc.training.snapshots.verified_file import DamagedSnapshotError, check_size, open_regular

_DIGEST_BYTES = 32
# A multiple of the size of a checksum, and of the size of a record.
BLOCK_BYTES = 6144


def tree_of(records: bytes) -> tuple[bytes, str]:
    """Returns the bytes of the file, and the checksum that verifies it."""
    levels = [records]
    while len(levels[-1]) > BLOCK_BYTES:
        below = levels[-1]
        blocks = (below[at : at + BLOCK_BYTES] for at in range(0, len(below), BLOCK_BYTES))
        levels.append(b"".join(hashlib.sha256(block).digest() for block in blocks))
    return b"".join(levels), hashlib.sha256(levels[-1]).hexdigest()


class ChecksumTree:
    """Reads the records of a file with the contents that `tree_of` returned.

    `num_bytes` is the size of all records, and `root` the checksum that verifies the file.
    """

    def __init__(self, path: Path, num_bytes: int, root: str) -> None:
        self._path, self._root = path, root
        self._sizes = [num_bytes]
        while self._sizes[-1] > BLOCK_BYTES:
            self._sizes.append(-(-self._sizes[-1] // BLOCK_BYTES) * _DIGEST_BYTES)
        self._blocks: dict[int, tuple[int, bytes]] = {}

    def check_size(self) -> None:
        """Raises DamagedSnapshotError if the file is missing or has the wrong size."""
        check_size(self._path, sum(self._sizes))

    def read(self, begin: int, num_bytes: int) -> bytes:
        """Returns a part of the records.

        Raises:
            DamagedSnapshotError: the file cannot be read, or a checksum does not match.
        """
        return self._read(0, begin, num_bytes)

    def _read(self, level: int, begin: int, num_bytes: int) -> bytes:
        found, at = [], begin
        while at < begin + num_bytes:
            number, inside = divmod(at, BLOCK_BYTES)
            found.append(self._block(level, number)[inside : inside + begin + num_bytes - at])
            at = (number + 1) * BLOCK_BYTES
        return b"".join(found)

    def _block(self, level: int, number: int) -> bytes:
        """Returns a verified block. The last block that was read of each level is cached."""
        if level not in self._blocks or self._blocks[level][0] != number:
            begin = number * BLOCK_BYTES
            content = self._pread(
                sum(self._sizes[:level]) + begin, min(BLOCK_BYTES, self._sizes[level] - begin)
            )
            if level + 1 < len(self._sizes):
                needed = self._read(level + 1, number * _DIGEST_BYTES, _DIGEST_BYTES).hex()
            else:
                needed = self._root
            if hashlib.sha256(content).hexdigest() != needed:
                raise DamagedSnapshotError(f"{self._path}: a SHA-256 checksum does not match")
            self._blocks[level] = number, content
        return self._blocks[level][1]

    def _pread(self, begin: int, num_bytes: int) -> bytes:
        try:
            with open_regular(self._path) as file:
                return os.pread(file.fileno(), num_bytes, begin)
        except (OSError, OverflowError) as error:
            raise DamagedSnapshotError(f"{self._path}: cannot be read") from error
