"""`ddp-hpc bench`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ddp_hpc.commands.job_options import TAKES_A_COMMAND, job_options_without
from ddp_hpc.errors import EXIT_WRONG_REQUEST, RequestError

_PATH = click.Path(path_type=Path)
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
_BACKENDS = ("auto", "gloo", "nccl", "mpi", "xccl")
_DEVICES = ("auto", "cuda", "cpu", "xpu")
_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


def _many(*default: Any) -> dict[str, Any]:
    """An option that may be repeated."""
    return {"multiple": True, "default": default, "show_default": True}


class _OfRanks(click.Command):
    """A command that ranks start together: of a wrong line, which all of them got, rank 0 alone tells."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _one_voice():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_voice():
            return super().invoke(ctx)


@contextmanager
def _one_voice() -> Iterator[None]:
    try:
        yield
    except (click.ClickException, RequestError):
        from ddp_hpc.world.launch_env import peek_rank

        if peek_rank(os.environ) != 0:
            raise click.exceptions.Exit(EXIT_WRONG_REQUEST) from None
        raise


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
    with _needs_torch("io"):
        from ddp_hpc.bench import io as bench_io
    gc.enable()  # main() disables it, and training does not
    bench_io.command(json_file, picture, **options)


@command.command(cls=_OfRanks)
@click.option("--collectives", metavar="NAME,NAME,...", help="Some of those above.  [all]")
@click.option("--bytes", multiple=True, metavar="SIZE", help="A size, instead of a sweep; may be repeated.")
@click.option("--min-bytes", metavar="SIZE", help="The sweep's first size.  [1KiB]")
@click.option("--max-bytes", metavar="SIZE", help="No size of the sweep is larger.  [64MiB]")
@click.option("--factor", type=click.IntRange(2), help="From one size to the next.  [4]")
@click.option("--dtype", type=click.Choice(_DTYPES), default="float32", show_default=True)
@click.option(
    "--ranks-per-node", default="all", show_default=True, metavar="N,...,all",
    help="Groups of so many ranks of each node, one after another: 1,all compares nodes with ranks.",
)  # fmt: skip
@click.option(
    "--buckets-of", metavar="MODEL",
    help="All_reduce of the gradients of transformer, classifier, linear, decoder or package.module:factory, "
    "in the buckets that DDP makes of them.",
)  # fmt: skip
@click.option("--model-option", "model_options", metavar="NAME=VALUE", multiple=True, help="Of the factory.")
@click.option("--data", type=_PATH, metavar="FILE", help="MODEL is made for the samples of this file.")
@click.option("--src-shape", metavar="N,N,...", help="MODEL is made for such samples.  [as in training]")
@click.option("--tgt-shape", metavar="N,N,...")
@click.option(
    "--bucket-mib", type=float, metavar="MIB",
    help="DDP's bucket_cap_mb.  [25, and a first bucket of 1; ddp_hpc.train gives 25]",
)  # fmt: skip
@click.option(
    "--warmup", type=click.IntRange(0, 10_000), default=5, show_default=True, help="Calls, untimed."
)
@click.option(
    "--iterations", type=click.IntRange(1, 100_000), default=100, show_default=True, help="Calls, timed."
)
@click.option(
    "--seconds",
    type=float,
    default=2.0,
    show_default=True,
    help="Fewer calls (5 at least) where they take longer.",
)
@click.option("--json", "json_file", type=_PATH, metavar="FILE")
@click.option("--picture", type=_PATH, metavar="FILE.png|FILE.svg", help="Bus bandwidth over size.")
@click.option(
    "--baseline", type=_PATH, metavar="FILE", help="The --json of an earlier run: slower rows fail."
)
@click.option(
    "--tolerance", type=float, default=0.2, show_default=True, help="A median may be longer by such a share."
)
@click.option(
    "--discovery", default="auto", show_default=True, metavar="NAME", help="Who says which rank this is."
)
@click.option("--backend", type=click.Choice(_BACKENDS), default="auto", show_default=True)
@click.option("--device", type=click.Choice(_DEVICES), default="auto", show_default=True)
@click.option(
    "--init-timeout", "init_timeout_s", type=float, default=300.0, show_default=True,
    help="Seconds for all ranks to find each other.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=float, default=1800.0, show_default=True,
    help="Seconds a rank waits for the others in one collective.",
)  # fmt: skip
@click.option(
    "--hang-timeout", "hang_timeout_s", type=float, default=120.0, show_default=True,
    help="Seconds without any progress after which the job is ended, with the rank that hangs by name.",
)  # fmt: skip
def comm(**options: Any) -> None:
    """How fast the ranks that a launcher started move bytes among each other, and whether rightly.

    Each row is one collective at one size: the median and the 99th percentile over the calls of what the
    slowest rank took, counted from a barrier; algbw and busbw as nccl-tests defines them. Results are
    compared with what has to come back; a wrong one ends with exit code 1, and so does a row that is slower
    than --baseline allows.

    \b
    all_reduce      each rank gets the sum of what all have
    reduce          the first rank gets it
    broadcast       each rank gets what the first has
    all_gather      each rank gets what all have; its size is that of the result
    reduce_scatter  each rank gets its part of the sum; its size is that of what a rank has
    all_to_all      each rank gets one part from each
    send_recv       each rank sends to the next, all at once

    \b
    Examples:
      mpiexec -n 4 ddp-hpc bench comm
      srun ddp-hpc bench comm --collectives all_reduce --max-bytes 1GiB --json comm.json --picture comm.png
      ddp-hpc launch -n 8 -- ddp-hpc bench comm --ranks-per-node 1,all
      mpiexec -n 4 ddp-hpc bench comm --buckets-of transformer
      mpiexec -n 4 ddp-hpc bench comm --buckets-of mine:net --model-option width=64
      mpiexec -n 4 ddp-hpc bench comm --bytes 1MiB --baseline comm.json --tolerance 0.1
      torchrun --standalone --nproc-per-node 4 -m ddp_hpc bench comm
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    with _needs_torch("comm"):
        from ddp_hpc.bench import comm as bench_comm
    bench_comm.command(**options)


@contextmanager
def _needs_torch(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise RequestError(
            f"bench {name} needs {error.name}, which is not installed; pip install 'ddp-hpc[train]'"
        ) from error


@command.command("scaling", context_settings=TAKES_A_COMMAND)
@click.option("--ranks", metavar="N,N,...", help="Ranks of the points.  [1,2,4,... to what is here]")
@click.option("--nodes", metavar="N,N,...", help="Nodes of the points, all of them filled; or --ranks.")
@click.option("--mode", type=click.Choice(["weak", "strong", "both"]), default="both", show_default=True)
@click.option("--dir", "folder", type=_PATH, default=Path("scaling"), show_default=True)
@click.option("--batch-size", type=click.IntRange(1, 10**9), metavar="N", default=32, show_default=True,
              help="Samples a rank; of strong scaling at its smallest point.")  # fmt: skip
@click.option("--global-batch", type=click.IntRange(1, 10**12), metavar="N",
              help="Samples a step of strong scaling.  [the batch size x the fewest ranks]")  # fmt: skip
@click.option("--steps", type=click.IntRange(1, 10**6), metavar="N", default=20, help="That are timed.  [20]")
@click.option("--warm-up", type=click.IntRange(1, 10**6), metavar="N", default=3, help="Steps before.  [3]")
@click.option("--trace-steps", type=click.IntRange(0, 100), metavar="N", default=2,
              help="Steps after, for the share of communication.  [2]")  # fmt: skip
@click.option("--submit", is_flag=True, help="Queue a job for each point; prints their ids.")
@click.option("--gather", is_flag=True, help="Start nothing: the table of what is in --dir so far.")
@click.option("--wait", is_flag=True, help="With --gather: until no job waits or runs any more.")
@click.option("--dry-run", is_flag=True, help="Print the scripts or launch lines, and touch nothing.")
@click.option("--json", "json_file", type=_PATH, metavar="FILE")
@click.option("--picture", type=_PATH, metavar="FILE.png|FILE.svg")
@click.option("--markdown", type=_PATH, metavar="FILE", help="The table, and what it was measured on.")
@job_options_without("nodes", "run_dir", "max_attempts", "min_nodes")
@click.argument("training", nargs=-1, type=click.UNPROCESSED)
def scaling(**options: Any) -> None:
    """Train on 1, 2, 4, ... ranks or nodes: speed-up, efficiency and share of communication.

    Weak scaling keeps the samples a rank, strong scaling those of a step. The options after -- are those of
    python -m ddp_hpc.train. Points run here one after another, or with --submit as a job each. The same
    command again runs only what is not done yet.

    Ends with 0 where all points are done, with 75 where jobs wait or run, with 1 where a point failed.

    \b
    Examples:
      ddp-hpc bench scaling --ranks 1,2,4 --picture scaling.png
      ddp-hpc bench scaling --mode strong --global-batch 256 -- --model-option width=64 --model mine:net
      ddp-hpc bench scaling --submit --nodes 1,2,4,8 --walltime 00:10:00 --account MYPROJECT
      ddp-hpc bench scaling --submit --ranks 1,2,4,8 --walltime 00:10:00 --dry-run -- --amp bf16 --fused
      ddp-hpc bench scaling --gather --wait --markdown scaling.md
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    from ddp_hpc.commands.scaling.command import run

    run(click.get_current_context(), **options)
