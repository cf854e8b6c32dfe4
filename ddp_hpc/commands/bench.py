"""`ddp-hpc bench`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import click

from ddp_hpc.errors import RequestError

_PATH = click.Path(path_type=Path)
_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


def _many(*default: Any) -> dict[str, Any]:
    """An option that may be repeated."""
    return {"multiple": True, "default": default, "show_default": True}


@click.group("bench")
def command() -> None:
    """Benchmarks of this machine: a table on stdout, and JSON or a picture where asked for."""


@command.command()
@click.option("--num-samples", type=int, metavar="N", help="Samples of the synthetic data.  [2048]")
@click.option("--src-shape", metavar="N,N,...", help="Shape of one sample of src.  [1,512]")
@click.option("--tgt-shape", metavar="N,N,...", help="Shape of one sample of tgt.  [20,512]")
@click.option("--dtype", metavar="NAME", help="[float32]")
@click.option("--formats", metavar="F,F,...", help="Of hdf5,hdf5_chunked,hdf5_gzip,pt,safetensors.  [all]")
@click.option("--access", "accesses", type=click.Choice(["shuffled", "sequential"]), **_many("shuffled"))
@click.option("--batch-size", "batch_sizes", type=click.IntRange(1), metavar="N", **_many(32))
@click.option("--ahead", type=click.IntRange(0, 64), help="Batches a thread reads ahead.", **_many(0, 2))
@click.option("--workers", type=click.IntRange(0, 64), help="Processes that read.", **_many(0))
@click.option("--rounds", type=click.IntRange(1), default=8, show_default=True, help="Turns of each row.")
@click.option("--seconds", type=click.FloatRange(0, 3600), default=0.25, show_default=True, help="Of a turn.")
@click.option("--cold", is_flag=True, help="Try to drop the files from the page cache before each turn.")
@click.option("--dir", "folder", type=_FOLDER, help="Where to make the files.  [a temporary folder]")
@click.option("--data", type=_PATH, metavar="FILE", help="Read this file instead.")
@click.option("--src-key", default="src", show_default=True, metavar="KEY", help="Name of src in FILE.")
@click.option("--tgt-key", default="tgt", show_default=True, metavar="KEY", help="Name of tgt in FILE.")
@click.option("--json", "json_file", type=_PATH, metavar="FILE")
@click.option("--picture", type=_PATH, metavar="FILE.png|FILE.svg")
def io(json_file: Path | None, picture: Path | None, **options: Any) -> None:
    """How long a batch takes to read, in each format, beside other ways to read it.

    Repeat --access, --batch-size, --ahead and --workers to compare. The files are removed at the end.

    \b
    memcpy          the bytes of a batch, lying together, copied within memory: the floor
    memory          a TensorDataset in memory behind a DataLoader
    memory_indexed  the same tensors, indexed a batch at a time
    memory_gather   samples copied one by one out of memory: no file can do better
    naive_hdf5      one h5py read a sample, behind a DataLoader
    h5py_batch      one h5py read a batch, of ascending numbers
    hdf5, pt, ...   the trainer's own loader; with ahead=N or workers=N nothing computes meanwhile,
                    so this is what it costs and not what training waits

    \b
    Examples:
      ddp-hpc bench io --json io.json --picture io.png
      ddp-hpc bench io --dir /lustre/me --cold --workers 0 --workers 4
      ddp-hpc bench io --data train.h5 --access shuffled --access sequential
      # samples of 10 MB
      ddp-hpc bench io --num-samples 64 --batch-size 8 --src-shape 1,1280000 --tgt-shape 1,1280000
      # samples of 256 bytes
      ddp-hpc bench io --src-shape 32 --tgt-shape 32 --batch-size 32 --batch-size 1024
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    try:
        from ddp_hpc.bench import io as bench_io
    except ModuleNotFoundError as error:
        raise RequestError(
            f"bench io needs {error.name}, which is not installed; pip install 'ddp-hpc[train]'"
        ) from error
    gc.enable()  # main() disables it, and training does not
    bench_io.command(json_file, picture, **options)
