"""Reads the Python files of a program: its own file, and the modules that it imports.

The modules are searched in the directory of the program, and in the directory in which it is started and its
subdirectory `src`, which PYTHONPATH or an editable installation can add.

The files are parsed, never run. What a user names as a program can be anything: a pipe, a directory, a large
file, or no Python at all.
"""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from ddp_hpc.request.program import Program

_MAX_BYTES = 256 * 1024
_MAX_FILES = 50
# The files of ddp-hpc are not part of a program, even if it is started in their directory.
_OWN = "ddp_hpc"


@dataclass(frozen=True)
class ProgramFiles:
    """The parsed files of a program.

    `names` contains the paths of the files in `trees`, as seen from the directory in which it is started.
    `elsewhere` contains the dotted names of imported modules that are not in the directories. `is_complete`
    is False if a file is missing or cannot be parsed, or if there are too many.
    """

    trees: tuple[ast.Module, ...]
    elsewhere: frozenset[str]
    is_complete: bool
    names: tuple[str, ...]

    @property
    def packages_elsewhere(self) -> frozenset[str]:
        """The names of the packages in `elsewhere`, such as `mpi4py` for `mpi4py.MPI`."""
        return frozenset(name.partition(".")[0] for name in self.elsewhere)


def files_of(program: Program, directory: Path) -> ProgramFiles:
    """Reads the files of a program that is started in `directory`. It has no files if they are unknown."""
    roots, pending = _first_files(program, directory)
    trees: dict[Path, ast.Module | None] = {}
    elsewhere: set[str] = set()
    while pending and len(trees) < _MAX_FILES:
        path = pending.pop()
        if path in trees:
            continue
        trees[path] = tree = _parsed(path)
        for name in _imports(tree, path, roots) if tree else ():
            local = _files_of(name, roots)
            pending += local
            if not local and not any(_has_modules(root.joinpath(*name.split("."))) for root in roots):
                elsewhere.add(name)
    parsed = {path: tree for path, tree in trees.items() if tree is not None}
    is_complete = bool(parsed) and len(parsed) == len(trees) and trees.keys() >= set(pending)
    names = tuple(os.path.relpath(path, directory) for path in parsed)
    return ProgramFiles(tuple(parsed.values()), frozenset(elsewhere), is_complete, names)


def text_of(path: Path) -> bytes | None:
    """Returns the content of a file; None if it cannot be read, is not a regular file, or is too large."""
    try:
        # Reading from a pipe or a device might never end.
        if not _is_file(path) or path.stat().st_size > _MAX_BYTES:
            return None
        return path.read_bytes()
    except OSError:
        return None


def _first_files(program: Program, directory: Path) -> tuple[tuple[Path, ...], list[Path]]:
    """Returns the directories of the program's modules, and the files that are run first."""
    roots = (directory, directory / "src")
    if program.kind == "module":
        return roots, _files_of(f"{program.name}.__main__", roots)
    path = directory / program.name
    is_known = program.kind == "file" and "$" not in program.name
    return tuple(dict.fromkeys((path.parent, *roots))), [path] if is_known else []


def _parsed(path: Path) -> ast.Module | None:
    text = text_of(path)
    if text is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the user's code, such as invalid escape sequences
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _imports(tree: ast.Module, path: Path, roots: tuple[Path, ...]) -> Iterator[str]:
    """Yields the dotted names of the modules that a file imports, as seen from one of the directories."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ""
            if node.level:
                above = path.parents[min(node.level, len(path.parents)) - 1]
                inside = (above.relative_to(root).parts for root in roots if above.is_relative_to(root))
                package = ".".join(next(inside, ()))
            module = ".".join(filter(None, (package, node.module or "")))
            if module:
                yield module
            names = (f"{module}.{alias.name}".lstrip(".") for alias in node.names)
            yield from (name for name in names if any(_file_of(name, root) for root in roots))


def _files_of(module: str, roots: tuple[Path, ...]) -> list[Path]:
    """Returns the files that the import of a module runs: those of its packages and its own."""
    names = list(accumulate(module.split("."), "{}.{}".format))
    files = ([path for name in names if (path := _file_of(name, root))] for root in roots)
    return next(filter(None, files), [])


def _file_of(module: str, root: Path) -> Path | None:
    """Returns the file of a module in `root`; None if it is not there."""
    if not module or module.partition(".")[0] == _OWN:
        return None
    place = root.joinpath(*module.split("."))
    for path in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
        if _is_file(path):
            return path
    return None


def _has_modules(path: Path) -> bool:
    """Returns whether a path is a directory that can be imported as a package without `__init__.py`."""
    return os.path.isdir(path) and any(path.glob("*.py"))  # noqa: PTH112 - Path.is_dir raises errors, too


def _is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises errors, for example if a name is too long
