"""A file that is asked for: whether it is there already, and whether there is room for it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from data_gen.formats import Contents, ForeignFileError, read_stamp
from data_gen.partial import WRITER, signals_held
from ddp_hpc.errors import RequestError
from ddp_hpc.partial_files import remove_leftovers
from ddp_hpc.units import format_bytes

# What HDF5, zip and safetensors add around the arrays, generously.
_OVERHEAD_BYTES = 64 * 1024
# Of another file's recipe, which may be anybody's.
_MAX_SHOWN, _MAX_DIFFERENCES = 100, 8


@dataclass(frozen=True)
class Target:
    """A file of these contents at `path`; `force` takes no heed of what is there."""

    path: Path
    file: Path
    """What is written: where `path` is a link, the file behind it."""
    contents: Contents
    force: bool

    @classmethod
    def of(cls, path: Path, contents: Contents, force: bool) -> Target:
        """The target that a user names by its path."""
        return cls(path, Path(os.path.realpath(path)), contents, force)

    @property
    def suffix(self) -> str:
        """The one that names the format."""
        return self.path.suffix.lower()

    def refuse_no_file(self) -> None:
        """Raises RequestError for a folder or a device, and where nobody can tell."""
        try:
            if self.file.is_dir():
                raise RequestError(f"{self.path} is a folder; name a file in it")
            if self.file.exists() and not self.file.is_file():
                raise RequestError(f"{self.path} is not a regular file; name another")
        except OSError as error:
            raise RequestError(
                f"{self.path} cannot be looked at: {error.strerror}; name a file in another folder"
            ) from None

    def prepare_folder(self, num_bytes: int) -> None:
        """The folder is there, without what killed writers left.

        Raises:
            RequestError: it cannot be, or it has no room for so many bytes of values.
        """
        folder, needed_bytes = self.file.parent, num_bytes + _OVERHEAD_BYTES
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder, WRITER)
            free_bytes = shutil.disk_usage(folder).free
        except OSError as error:
            raise RequestError(
                f"no folder for {self.path}: {error}; name a file in another folder"
            ) from error
        if free_bytes < needed_bytes:
            raise RequestError(
                f"{self.path} needs {format_bytes(needed_bytes)} and {folder} has {format_bytes(free_bytes)} "
                "free; free space, ask for fewer samples, or name a file in another folder"
            )

    def is_there(self) -> bool:
        """Whether a complete file of these contents is there already.

        Raises:
            RequestError: another file is.
        """
        if self.force or not self.file.exists():
            return False
        ways_out = "name another file, remove this one, or overwrite it: data_gen's commands have --force"
        try:
            with signals_held():
                theirs, arrays = read_stamp(self.file, self.suffix)
        except ForeignFileError as error:
            raise RequestError(
                f"{self.path} exists and is not a file that data_gen wrote, or a damaged one ({error}); "
                f"{ways_out}"
            ) from None
        ours = self.contents.recipe
        if theirs != ours:
            keys = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
            if "kind" in keys:  # then nothing else is comparable
                keys = ["kind"]
            differences = ", ".join(
                f"{_shown(key)} {_shown(theirs.get(key))} there and {_shown(ours.get(key))} asked for"
                for key in keys[:_MAX_DIFFERENCES]
            )
            raise RequestError(f"{self.path} exists and holds other data: {differences}; {ways_out}")
        if arrays != self.contents.arrays:
            found = ", ".join(f"{array.name} {array.shape} {array.dtype}" for array in arrays)
            raise RequestError(
                f"{self.path} has the recipe asked for but is damaged: it holds {found}; {ways_out}"
            )
        return True


def _shown(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    plain = "".join(char for char in text[:_MAX_SHOWN] if char.isprintable())
    return "nothing" if value is None else plain
