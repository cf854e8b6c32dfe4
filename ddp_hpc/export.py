"""`python -m ddp_hpc.export`: writes the model of a snapshot in a form that other programs can read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ddp_hpc.base.atomic_files import move_into_place, partial_file, remove_leftovers, sync_to_disk
from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.errors_to_exit_codes import exit_code_of
from ddp_hpc.base.pip_extras import require
from ddp_hpc.base.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

    from ddp_hpc.training.snapshots.host_buffer import Specs

# The size from which Hugging Face splits a model into several files.
_FILE_BYTES = 5 * 10**9
_EXAMPLES = """\b
Examples:
  python -m ddp_hpc.export runs/ddp/snapshots model.safetensors
  python -m ddp_hpc.export runs/ddp/snapshots/step_00000120 model.pt
  python -m ddp_hpc.export runs/ddp/snapshots my-model     # the layout of Hugging Face

\b
In Python:
  model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
  model.load_state_dict(torch.load("model.pt"))
"""


@click.command(epilog=_EXAMPLES, context_settings={"max_content_width": 100})
@click.argument("snapshot", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite OUTPUT if it is a file.")
@click.version_option(__version__, prog_name="ddp-hpc")
def command(snapshot: Path, output: Path, force: bool) -> None:
    """Write the model of SNAPSHOT to OUTPUT: a file that ends in .safetensors or .pt, or a directory.

    SNAPSHOT is a directory such as step_00000120, or a directory of snapshots (the newest is used).
    The command verifies the checksums of the snapshot, and writes whole tensors even if each rank has saved
    only its shards. The names of the parameters are those of the model without the DDP wrapper.

    An OUTPUT without a suffix is a new directory in the layout that Hugging Face loads: model.safetensors,
    or for a large model, several files and model.safetensors.index.json.
    """
    require("ddp-hpc export", "train", "torch", "numpy", "safetensors")
    _check(output, force)
    from ddp_hpc.training.snapshots.snapshot_files import naming_the_previous, read_named, specs_of_saved

    read = read_named(snapshot)
    write = {".pt": _write_pt, ".safetensors": _write_safetensors, "": _write_directory}[output.suffix]
    try:
        remove_leftovers(output.absolute().parent, "export")
        with naming_the_previous(read.path), partial_file(output, "export") as partial:
            write(read.model, partial)
            move_into_place(partial, output, replace=force)
    except OSError as error:
        raise DdpHpcError(f"{output} cannot be written; choose another file") from error
    specs = specs_of_saved(read.model)
    num_values = sum(prod(shape) for shape, _ in specs.values())
    click.echo(f"wrote {output}: {len(specs)} tensors, {num_values:,} values from {read.path}", err=True)


def _check(output: Path, force: bool) -> None:
    if output.suffix not in (".safetensors", ".pt", ""):
        raise RequestError(
            f"{output}: the suffix {output.suffix!r} is not supported; use .safetensors or .pt, or the "
            "name of a new directory without a suffix"
        )
    if output.exists() and not (force and output.suffix):
        instead = "choose another file, or use --force" if output.suffix else "choose another directory"
        raise RequestError(f"{output} already exists; {instead}")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise RequestError(
            f"{output} is a directory, or is in a directory that does not exist; give a file "
            "name in an existing directory"
        )


def _write_pt(model: Mapping[str, Tensor], path: Path) -> None:
    import torch

    try:
        torch.save(dict(model), path)
    except RuntimeError as error:  # torch raises RuntimeError if the disk is full
        raise OSError(str(error).splitlines()[0]) from error


def _write_safetensors(model: Mapping[str, Tensor], path: Path) -> None:
    from ddp_hpc.training.snapshots.snapshot_files import specs_of_saved

    _write_file(model, specs_of_saved(model), path)


def _write_directory(model: Mapping[str, Tensor], path: Path) -> None:
    """Writes the layout of Hugging Face's `save_pretrained`, without the files that describe the model."""
    from ddp_hpc.training.snapshots.host_buffer import num_bytes_of
    from ddp_hpc.training.snapshots.snapshot_files import specs_of_saved

    groups = list(_groups(specs_of_saved(model)))
    path.mkdir()
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    if len(groups) == 1:
        _write_file(model, groups[0], path / "model.safetensors")
    else:
        for name, specs in zip(names, groups, strict=True):
            _write_file(model, specs, path / name)
        index = {
            "metadata": {"total_size": sum(map(num_bytes_of, groups))},
            "weight_map": {key: name for name, specs in zip(names, groups, strict=True) for key in specs},
        }
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    sync_to_disk(path)


def _groups(specs: Specs) -> Iterator[Specs]:
    """Divides the tensors into groups, each of which has at most `_FILE_BYTES` or a single tensor."""
    from ddp_hpc.training.snapshots.host_buffer import num_bytes_of

    group: dict[str, Any] = {}
    total = 0
    for name, spec in specs.items():
        num_bytes = num_bytes_of({name: spec})
        if group and total + num_bytes > _FILE_BYTES:
            yield group
            group, total = {}, 0
        group[name] = spec
        total += num_bytes
    yield group


def _write_file(model: Mapping[str, Tensor], specs: Specs, path: Path) -> None:
    """Writes one safetensors file; only one tensor at a time has to be in memory."""
    import torch

    from ddp_hpc.training.snapshots.host_buffer import file_layout

    # transformers refuses files without this entry.
    first, begins, _ = file_layout(specs, {"format": "pt"})
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
