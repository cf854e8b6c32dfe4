"""The commands `ddp-hpc bench io`, `comm` and `scaling`, which run benchmarks."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ddp_hpc.base.click_options import click_options
from ddp_hpc.base.errors import EXIT_WRONG_REQUEST, RequestError
from ddp_hpc.base.pip_extras import require
from ddp_hpc.commands.job_options import TAKES_A_COMMAND, job_options
from ddp_hpc.training.config import TrainConfig

_PATH = click.Path(path_type=Path)
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
_LAUNCH_OPTIONS = ("profile", "ranks_per_node", "launcher", "mpi", "env", "fallback")
_json_option = click.option(
    "--json", "json_file", type=_PATH, metavar="FILE", help="Write the results to this file as JSON."
)


class _RankCommand(click.Command):
    """A command that all ranks run with the same arguments; only rank 0 prints errors in these arguments."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _errors_on_rank_0():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _errors_on_rank_0():
            return super().invoke(ctx)


@contextmanager
def _errors_on_rank_0() -> Iterator[None]:
    try:
        yield
    except (click.ClickException, RequestError):
        from ddp_hpc.discovery.launcher_environment import peek_rank

        if peek_rank(os.environ) != 0:
            raise click.exceptions.Exit(EXIT_WRONG_REQUEST) from None
        raise


@click.group("bench")
def command() -> None:
    """Run benchmarks and print the results as a table, and optionally write JSON files."""


@command.command(context_settings={"show_default": True})
@click.option("--num-samples", type=int, metavar="N", help="Number of synthetic samples.  [default: 2048]")
@click.option("--src-shape", metavar="N,N,...", help="Shape of one sample of src.  [default: 1,512]")
@click.option("--tgt-shape", metavar="N,N,...", help="Shape of one sample of tgt.  [default: 20,512]")
@click.option("--dtype", metavar="NAME", help="Data type of the synthetic samples.  [default: float32]")
@click.option("--formats", metavar="F,F,...",
              help="Comma-separated list of file formats to measure: "
              "hdf5,hdf5_chunked,hdf5_gzip,pt,safetensors.  "
                   "[default: all]")  # fmt: skip
@click.option("--access", "accesses", type=click.Choice(["shuffled", "sequential"]), multiple=True,
              default=["shuffled"], help="Order in which samples are read; may be repeated.")  # fmt: skip
@click.option("--batch-size", "batch_sizes", type=click.IntRange(1), metavar="N", multiple=True, default=[32],
              help="Number of samples per batch; may be repeated.")  # fmt: skip
@click.option("--ahead", type=click.IntRange(0, 64), multiple=True, default=[0, 2],
              help="Number of batches that a thread reads ahead; may be repeated.")  # fmt: skip
@click.option("--workers", type=click.IntRange(0, 64), multiple=True, default=[0],
              help="Number of worker processes that read batches; may be repeated.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=8, help="Number of measurement rounds per row.")
@click.option("--seconds", type=click.FloatRange(0, 3600), default=0.25,
              help="Duration of each measurement round in seconds.")  # fmt: skip
@click.option("--dir", "directory", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Directory for new data files.  [default: a temporary directory]")  # fmt: skip
@click.option("--data", type=_PATH, metavar="FILE", help="Read this file instead of synthetic data.")
@click.option("--src-key", default="src", metavar="KEY", help="Name of the array src in the file of --data.")
@click.option("--tgt-key", default="tgt", metavar="KEY", help="Name of the array tgt in the file of --data.")
@_json_option
def io(json_file: Path | None, **options: Any) -> None:
    """Measure how long it takes to read a batch from each file format, and compare with other data loaders.

    To compare several values of --access, --batch-size, --ahead or --workers, repeat the option. The command
    deletes its data files when it ends.

    \b
    memcpy          copies contiguous bytes of the size of a batch in memory, the lower limit
    memory          reads a TensorDataset in memory with a DataLoader
    memory_indexed  indexes the same tensors with the numbers of a batch
    naive_hdf5      reads each sample with h5py in a DataLoader
    h5py_batch      reads each batch with one call of h5py, in ascending order
    hdf5, pt, ...   use the trainer's loader; with ahead=N or workers=N, reading overlaps with
                    computing in training, which therefore waits less than the time shown

    \b
    Examples:
      ddp-hpc bench io --json io.json
      ddp-hpc bench io --dir /lustre/me --workers 0 --workers 4
      ddp-hpc bench io --data train.h5 --access shuffled --access sequential
      # samples of 10 MB
      ddp-hpc bench io --num-samples 64 --batch-size 8 --src-shape 1,1280000 --tgt-shape 1,1280000
      # samples of 256 bytes
      ddp-hpc bench io --src-shape 32 --tgt-shape 32 --batch-size 32 --batch-size 1024
    """  # noqa: D301 - click does not rewrap the paragraph after a real \b
    require("ddp-hpc bench io", "train", "torch", "numpy", "h5py")
    from ddp_hpc.bench.data_loading import benchmark as bench_io

    gc.enable()  # as in training; ddp_hpc.cli.main disables garbage collection
    bench_io.command(json_file, **options)


@command.command(cls=_RankCommand, context_settings={"show_default": True})
@click.option(
    "--collectives",
    metavar="NAME,NAME,...",
    help="Comma-separated list of collectives to measure.  [default: all]",
)
@click.option("--bytes", multiple=True, metavar="SIZE",
              help="Message size to measure, instead of --min-bytes to --max-bytes; may be "
                   "repeated.")  # fmt: skip
@click.option("--min-bytes", metavar="SIZE", help="Smallest message size to measure.  [default: 1KiB]")
@click.option("--max-bytes", metavar="SIZE", help="Largest message size to measure.  [default: 64MiB]")
@click.option("--factor", type=click.IntRange(2), help="Ratio of successive message sizes.  [default: 4]")
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    default="float32",
    help="Data type of the elements of the messages.",
)
@click.option("--warmup", type=click.IntRange(0, 10_000), default=5,
              help="Number of warm-up calls per row, which are not timed.")  # fmt: skip
@click.option("--iterations", type=click.IntRange(1, 100_000), default=100,
              help="Number of timed calls per row.")  # fmt: skip
@click.option("--seconds", type=float, default=2.0,
              help="Time limit per row in seconds. A slow row makes fewer timed calls than requested, but at "
              "least 5.")  # fmt: skip
@_json_option
@click_options(TrainConfig, ("discovery", "backend", "device", "init_timeout", "timeout"))
@click.option("--hang-timeout", type=float, default=120.0,
              help="Seconds without progress after which the run is aborted and the hanging rank is "
                   "reported.")  # fmt: skip
def comm(**options: Any) -> None:
    """Measure the speed of collective operations between the ranks, and verify their results.

    Each row of the table shows one collective with one message size. The times are measured from a barrier
    until the slowest rank finishes; the table shows their median and 99th percentile. algbw and busbw are
    defined as in nccl-tests. All results are checked. The exit code is 1 if a result is wrong.

    \b
    all_reduce      each rank gets the sum over all ranks
    reduce          the first rank gets the sum over all ranks
    broadcast       each rank gets the data of the first rank
    all_gather      each rank gets the data of all ranks; the message size is the size of the result
    reduce_scatter  each rank gets a shard of the sum; the message size is the size of the input
    all_to_all      each rank gets a different shard of the data of every rank
    send_recv       all ranks send to the next rank at the same time

    \b
    Examples:
      mpiexec -n 4 ddp-hpc bench comm
      srun ddp-hpc bench comm --collectives all_reduce --max-bytes 1GiB --json comm.json
      ddp-hpc launch --ranks-per-node 1 -- ddp-hpc bench comm
      mpiexec -n 4 ddp-hpc bench comm --collectives all_reduce --bytes 1MiB --bytes 25MiB
      torchrun --standalone --nproc-per-node 4 -m ddp_hpc bench comm
    """  # noqa: D301 - click does not rewrap the paragraph after a real \b
    require("ddp-hpc bench comm", "train", "torch", "numpy")
    from ddp_hpc.bench.comm import benchmark as bench_comm

    bench_comm.command(**options)


@command.command("scaling", context_settings=TAKES_A_COMMAND)
@click.option("--ranks", metavar="N,N,...",
              help="Numbers of ranks to measure.  [default: 1,2,4,... up to all available]")  # fmt: skip
@click.option("--nodes", metavar="N,N,...",
              help="Numbers of full nodes to measure, instead of --ranks.")  # fmt: skip
@click.option("--mode", type=click.Choice(["weak", "strong", "both"]), default="both", show_default=True,
              help="Keep the batch size constant per rank (weak) or over all ranks (strong).")  # fmt: skip
@click.option("--dir", "folder", type=_PATH, default=Path("scaling"), show_default=True,
              help="Directory in which the runs and their results are stored.")  # fmt: skip
@click.option("--batch-size", type=click.IntRange(1, 10**9), metavar="N", default=32, show_default=True,
              help="Number of samples per rank and step; with strong scaling, this applies to the run with "
              "the fewest ranks.")  # fmt: skip
@click.option("--global-batch", type=click.IntRange(1, 10**12), metavar="N",
              help="Total number of samples per step with strong scaling.  [default: --batch-size times the "
              "smallest number of ranks]")  # fmt: skip
@click.option("--steps", type=click.IntRange(1, 10**6), metavar="N", default=20, show_default=True,
              help="Number of timed steps.")  # fmt: skip
@click.option("--warm-up", type=click.IntRange(1, 10**6), metavar="N", default=3, show_default=True,
              help="Number of warm-up steps, which are not timed.")  # fmt: skip
@click.option("--trace-steps", type=click.IntRange(0, 100), metavar="N", default=2, show_default=True,
              help="Number of steps to trace after the timed steps, to measure communication.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the launch commands without running them.")
@_json_option
@job_options(*_LAUNCH_OPTIONS)
@click.argument("training", nargs=-1, type=click.UNPROCESSED)
def scaling(**options: Any) -> None:
    """Measure the speed-up, the efficiency and the communication time of training on 1, 2, 4, ... ranks or
    nodes.

    Weak scaling keeps the number of samples per rank constant; strong scaling keeps the total number of
    samples per step constant. Options after -- are passed to python -m ddp_hpc.train. The points run one
    after the other, on this machine or in the current allocation. If you run the same command again, it
    measures only the points that have no results. The exit code is 1 if a point failed.

    \b
    Examples:
      ddp-hpc bench scaling --ranks 1,2,4
      ddp-hpc bench scaling --nodes 1,2,4,8 --json scaling.json
      ddp-hpc bench scaling --mode strong --global-batch 256 -- --model-option width=64 --model mine:net
    """  # noqa: D301 - click does not rewrap the paragraph after a real \b
    from ddp_hpc.commands.scaling import run

    job = {name: options.pop(name) for name in _LAUNCH_OPTIONS}
    click.get_current_context().exit(run(**options, job=job))
