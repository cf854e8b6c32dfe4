"""`python -m ddp_hpc.export`: writes the model of a snapshot in a form that other programs can read."""

from __future__ import annotations

import os
import sys
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from ddp_hpc.base.atomic_files import move_into_place, partial_file, remove_leftovers
from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.errors_to_exit_codes import exit_code_of
from ddp_hpc.base.pip_extras import require
from ddp_hpc.base.version import __version__

if TYPE_CHECKING:
    from ddp_hpc.training.snapshots.stored_tensors import StoredTensors

_EXAMPLES = """\b
Examples:
  python -m ddp_hpc.export runs/ddp/snapshots model.safetensors
  python -m ddp_hpc.export runs/ddp/snapshots/step_00000120 model.pt

\b
In Python:
  model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
  model.load_state_dict(torch.load("model.pt"))
"""


@click.command(epilog=_EXAMPLES, context_settings={"max_content_width": 100})
@click.argument("snapshot", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite OUTPUT.")
@click.version_option(__version__, prog_name="ddp-hpc")
def command(snapshot: Path, output: Path, force: bool) -> None:
    """Write the model of SNAPSHOT to OUTPUT, a file that ends in .safetensors or .pt.

    SNAPSHOT is a directory such as step_00000120, or a directory of snapshots (the newest is used).
    The command verifies the checksums of the snapshot, and writes whole tensors even if each rank has saved
    only its shards. The names of the parameters are those of the model without the DDP wrapper.
    """
    require("ddp-hpc export", "train", "torch", "numpy", "safetensors")
    _check(output, force)
    from ddp_hpc.training.snapshots.snapshot_files import naming_the_previous, read_named

    read = read_named(snapshot)
    write = {".pt": _write_pt, ".safetensors": _write_safetensors}[output.suffix]
    try:
        remove_leftovers(output.absolute().parent, "export")
        with naming_the_previous(read.path), partial_file(output, "export") as partial:
            write(read.model, partial)
            move_into_place(partial, output, replace=force)
    except OSError as error:
        raise DdpHpcError(f"{output} cannot be written; choose another file") from error
    num_values = sum(prod(shape) for shape, _ in read.model.specs.values())
    click.echo(f"wrote {output}: {len(read.model)} tensors, {num_values:,} values from {read.path}", err=True)


def _check(output: Path, force: bool) -> None:
    if output.suffix not in (".safetensors", ".pt"):
        raise RequestError(
            f"{output}: the suffix {output.suffix!r} is not supported; use .safetensors or .pt"
        )
    if output.exists() and not force:
        raise RequestError(f"{output} already exists; choose another file, or use --force")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise RequestError(
            f"{output} is a directory, or is in a directory that does not exist; give a file "
            "name in an existing directory"
        )


def _write_pt(model: StoredTensors, path: Path) -> None:
    import torch

    try:
        torch.save(dict(model), path)
    except RuntimeError as error:  # torch raises RuntimeError if the disk is full
        raise OSError(str(error).splitlines()[0]) from error


def _write_safetensors(model: StoredTensors, path: Path) -> None:
    """Writes a safetensors file; only one tensor at a time has to be in memory."""
    import torch

    from ddp_hpc.training.snapshots.host_buffer import file_layout

    # transformers refuses files without this entry.
    first, begins = file_layout(model.specs, {"format": "pt"})
    with path.open("xb") as file:
        file.write(first)
        for name in begins:
            file.write(model[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs the command and ends the process with its exit code."""
    sys.exit(exit_code_of(command, "python -m ddp_hpc.export", argv))


if __name__ == "__main__":
    main()
