"""Checks whether a file that will be written already exists, and whether there is space for it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data_gen.formats import Contents, ForeignFileError, format_of, read_stamp
from ddp_hpc.base.atomic_files import remove_leftovers
from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import format_bytes

WRITER = "data_gen"
"""The word for this writer in the names of partial files."""

# A generous limit for the metadata that HDF5, zip and safetensors add to the arrays.
_OVERHEAD_BYTES = 64 * 1024


@dataclass(frozen=True)
class OutputFile:
    """A file that will be written to `path`. With `force`, an existing file is overwritten."""

    path: Path
    """The path given by the user."""
    contents: Contents
    force: bool

    @cached_property
    def file(self) -> Path:
        """The file that is written, which is the target of the link if `path` is a symbolic link."""
        return Path(os.path.realpath(self.path))

    def check_regular_file(self) -> None:
        """Raises RequestError if the path is a directory or a device, or if it cannot be accessed."""
        try:
            if self.file.is_dir():
                raise RequestError(f"{self.path} is a directory; give the name of a file")
            if self.file.exists() and not self.file.is_file():
                raise RequestError(f"{self.path} is not a regular file; choose another name")
        except OSError as error:
            raise RequestError(
                f"cannot access {self.path}: {error.strerror}; use another directory"
            ) from None

    def prepare_directory(self) -> None:
        """Creates the directory if necessary, and removes partial files of killed writers from it.

        Raises:
            RequestError: the directory cannot be created, or it has too little space.
        """
        directory, needed_bytes = self.file.parent, self.contents.num_bytes + _OVERHEAD_BYTES
        try:
            directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(directory, WRITER)
            free_bytes = shutil.disk_usage(directory).free
        except OSError as error:
            raise RequestError(
                f"cannot use the directory of {self.path}: {error}; use another directory"
            ) from error
        if free_bytes < needed_bytes:
            raise RequestError(
                f"{self.path} needs {format_bytes(needed_bytes)}, but {directory} has only "
                f"{format_bytes(free_bytes)} free. "
                "Free space, request fewer samples, or use another directory."
            )

    def exists(self) -> bool:
        """Returns whether a complete file with these contents already exists.

        Raises:
            RequestError: a different file exists.
        """
        if self.force or not self.file.exists():
            return False
        hint = "Choose another name, remove the file, or overwrite it with --force."
        try:
            recipe, arrays = read_stamp(self.file, format_of(self.path))
        except ForeignFileError as error:
            raise RequestError(
                f"{self.path} exists, and it is damaged or was not written by data_gen ({error}). {hint}"
            ) from None
        requested = self.contents.recipe
        if keys := [key for key in sorted({*recipe, *requested}) if recipe.get(key) != requested.get(key)]:
            if "kind" in keys:  # files of different kinds have different keys
                keys = ["kind"]
            differences = ", ".join(
                f"{key} is {recipe.get(key)!r} instead of {requested.get(key)!r}" for key in keys
            )
            raise RequestError(f"{self.path} exists with different contents: {differences}. {hint}")
        if arrays != self.contents.arrays:
            shapes = ", ".join(f"{array.name} {array.shape} {array.dtype}" for array in arrays)
            raise RequestError(
                f"{self.path} exists with the requested recipe, but is damaged: it contains {shapes}. {hint}"
            )
        return True
