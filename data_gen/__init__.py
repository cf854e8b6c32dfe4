"""Data files for training: synthetic ones, scikit-learn's digits, MNIST's IDX files, text.

    from data_gen import Recipe, generate
    result = generate(Recipe(num_samples=4096), Path("data/train.h5"))

One process writes, or the ranks of a `Comm` each their part. Importing costs nothing:
NumPy and h5py are imported by the first call of `generate`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from data_gen.recipe import Recipe, default_file_name

if TYPE_CHECKING:
    from data_gen.writer import GenerateResult
    from ddp_hpc.world.comm import Comm

__all__ = ["Recipe", "default_file_name", "generate"]


def generate(
    recipe: Recipe,
    path: Path,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    comm: Comm | None = None,
) -> GenerateResult:
    """A finished file of this recipe at `path`: one already there with an equal fingerprint, or a new one.

    The suffix decides the format: `.h5`, `.hdf5`, `.pt` or `.safetensors`. Nobody
    ever sees half a file: it is written under a hidden name in the same folder
    and renamed when it is complete and on disk. `progress(done_bytes,
    total_bytes)` is called while it is written. With a `comm` all its ranks write the
    same bytes together, and rank 0 alone checks, renames and calls `progress`; collective
    then: every rank must call this.

    Raises:
        RequestError: unknown suffix, too little space, or another file at `path` and not `force`.
        DdpHpcError: the writing itself failed; nothing is left behind.
        ReportedElsewhereError: on the other ranks, where rank 0 raises one of these.
    """
    from data_gen.synthetic import generate as write

    return write(recipe, path, force=force, progress=progress, comm=comm)
