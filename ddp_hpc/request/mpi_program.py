"""Whether the ranks of a program connect with MPI alone, as far as its source code shows."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddp_hpc.request.program import program_of
from ddp_hpc.request.program_files import files_of

# Packages in which ranks do not connect, except with `torch.distributed`.
_WITHOUT_CONNECTIONS = frozenset(
    (
        "click", "h5py", "matplotlib", "numba", "numpy", "pandas", "psutil", "safetensors", "scipy",
        "torch", "torchvision", "tqdm", "yaml",
    )
)  # fmt: skip


def connects_only_with_mpi(command: Sequence[str], directory: Path) -> bool:
    """Returns whether the ranks of a program connect with mpi4py, and certainly in no other way."""
    if (program := program_of(command)) is None:
        return False
    files = files_of(program, directory)
    others = files.packages_elsewhere - sys.stdlib_module_names - _WITHOUT_CONNECTIONS
    uses_torch = any("distributed" in _names(tree) for tree in files.trees)
    return files.is_complete and others == {"mpi4py"} and not uses_torch


def _names(tree: ast.Module) -> Iterator[str]:
    """Yields the names of attributes and the parts of the names of imported modules."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                yield name
            case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
                yield from name.split(".")
            case _:
                pass
