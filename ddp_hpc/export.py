"""`python -m ddp_hpc.export`: writes the model of a snapshot to a file that plain torch can read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from ddp_hpc.entry import exit_code_of
from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.partial_files import move_into_place, partial_file, remove_leftovers
from ddp_hpc.version import __version__

if TYPE_CHECKING:
    from ddp_hpc.training.snapshots.snapshot_files import Snapshot

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
@click.option("--force", is_flag=True, help="Overwrite OUTPUT if it exists.")
@click.version_option(__version__, prog_name="ddp-hpc")
def command(snapshot: Path, output: Path, force: bool) -> None:
    """Write the model of SNAPSHOT to OUTPUT, which ends in .safetensors or .pt.

    SNAPSHOT is a directory such as step_00000120, or a directory of snapshots (the newest is used).
    The command first verifies the checksums of the snapshot. The names of the parameters are those of the
    model without the DDP wrapper.
    """
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
    import safetensors.torch

    from ddp_hpc.training.snapshots.snapshot_files import read_named

    read = read_named(snapshot)
    try:
        remove_leftovers(output.absolute().parent, "export")
        with partial_file(output, "export") as partial:
            if output.suffix == ".pt":
                _write_pt(read, partial)
            else:
                # The tensors are written from memory, because a running job may have removed the snapshot in
                # the meantime.
                partial.write_bytes(safetensors.torch.save(dict(read.model)))
            move_into_place(partial, output, replace=force)
    except OSError as error:
        raise DdpHpcError(f"{output}: cannot be written") from error
    num_values = sum(tensor.numel() for tensor in read.model.values())
    click.echo(f"wrote {output}: {len(read.model)} tensors, {num_values:,} values from {read.path}", err=True)


def _write_pt(read: Snapshot, path: Path) -> None:
    import torch

    try:
        torch.save(read.model, path)
    except RuntimeError as error:  # torch raises RuntimeError if the disk is full
        raise OSError(str(error).splitlines()[0]) from error


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs the command and ends the process with its exit code."""
    sys.exit(exit_code_of(command, "python -m ddp_hpc.export", argv))


if __name__ == "__main__":
    main()
