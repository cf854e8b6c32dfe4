"""The command line of the generator. NumPy, h5py and torch are imported by the work, not by --help."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from data_gen.progress import report_progress
from data_gen.recipe import DISTRIBUTIONS, DTYPE_BYTES, Recipe, default_file_name, parse_shape
from ddp_hpc import __version__
from ddp_hpc.errors import EXIT_INTERRUPTED, DdpHpcError, RequestError
from ddp_hpc.units import format_bytes

if TYPE_CHECKING:
    from data_gen.writer import GenerateResult, Progress

_DEFAULT = Recipe()
_FOLDER = Path("data")

_output_option = click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write; the suffix decides the format: .h5 .hdf5 .pt .safetensors.",
)
_force_option = click.option("--force", is_flag=True, help="Overwrite whatever is there.")
_seed_option = click.option("--seed", type=int, default=0, show_default=True)


def _shape(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    return parse_shape(text)


def _shape_option(name: str, default: tuple[int, ...]) -> Callable[[Any], Any]:
    return click.option(
        f"--{name}-shape",
        callback=_shape,
        default=",".join(map(str, default)),
        show_default=True,
        metavar="N,N,...",
        help=f"Shape of one sample of {name}.",
    )


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--num-samples", type=int, default=_DEFAULT.num_samples, show_default=True)
@_shape_option("src", _DEFAULT.src_shape)
@_shape_option("tgt", _DEFAULT.tgt_shape)
@click.option("--dtype", type=click.Choice(list(DTYPE_BYTES)), default=_DEFAULT.dtype, show_default=True)
@click.option(
    "--distribution",
    type=click.Choice(list(DISTRIBUTIONS)),
    default=_DEFAULT.distribution,
    show_default=True,
    help="uniform: values in [0, 1). learnable: tgt is a fixed linear map of src plus small noise.",
)
@_seed_option
@_output_option
@_force_option
@click.version_option(__version__, prog_name="data_gen")
@click.pass_context
def cli(
    context: click.Context,
    num_samples: int,
    src_shape: tuple[int, ...],
    tgt_shape: tuple[int, ...],
    dtype: str,
    distribution: str,
    seed: int,
    output: Path | None,
    force: bool,
) -> None:
    """Write a data file to train on; without a command, a synthetic one.

    An equal file that is there is used again, any other is refused. The path is
    printed on stdout, everything else on stderr.

    \b
    python -m data_gen
        data/synthetic-2048-1x512-20x512-float32-seed0-dc1ba503.h5, 84.0 MiB
    python -m data_gen --num-samples 65536 --output /scratch/$USER/big.h5
    python -m data_gen --src-shape 20 --tgt-shape 1 --distribution learnable
        for --model linear
    python -m data_gen digits
        real images, with a test split, for --model classifier
    python -m data_gen idx train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    if context.invoked_subcommand is not None:
        for option in context.params:
            if context.get_parameter_source(option) == ParameterSource.COMMANDLINE:
                raise click.UsageError(
                    f"--{option.replace('_', '-')} before {context.invoked_subcommand} is for synthetic "
                    f"files; write the options of {context.invoked_subcommand} behind it"
                )
        return
    recipe = Recipe(
        num_samples=num_samples,
        src_shape=src_shape,
        tgt_shape=tgt_shape,
        dtype=dtype,
        seed=seed,
        distribution=distribution,
    )
    path = output or _FOLDER / default_file_name(recipe)

    def write(progress: Progress) -> GenerateResult:
        from data_gen.synthetic import generate

        return generate(recipe, path, force=force, progress=progress)

    _write_and_tell(path, write)


@cli.command()
@_seed_option
@_output_option
@_force_option
def digits(seed: int, output: Path | None, force: bool) -> None:
    """Handwritten digits: 1,797 real 8 x 8 images from scikit-learn, a fifth of them for testing.

    \b
    python -m data_gen digits                           data/digits.h5
    python -m data_gen digits --output digits.pt
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    path = output or _FOLDER / "digits.h5"

    def write(progress: Progress) -> GenerateResult:
        from data_gen.digits import write_digits

        return write_digits(path, seed=seed, force=force, progress=progress)

    _write_and_tell(path, write)


@cli.command()
@click.argument("images", type=click.Path(path_type=Path))
@click.argument("labels", type=click.Path(path_type=Path))
@click.option("--test-images", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--test-labels", type=click.Path(path_type=Path), metavar="FILE")
@_output_option
@_force_option
def idx(
    images: Path,
    labels: Path,
    test_images: Path | None,
    test_labels: Path | None,
    output: Path | None,
    force: bool,
) -> None:
    """MNIST's files, and those of its kin: IMAGES and LABELS in the IDX format, plain or gzipped.

    \b
    python -m data_gen idx train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz \
        --test-images t10k-images-idx3-ubyte.gz --test-labels t10k-labels-idx1-ubyte.gz \
        --output data/mnist.h5
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    path = output or _FOLDER / f"{images.name.removesuffix('.gz')}.h5"

    def write(progress: Progress) -> GenerateResult:
        from data_gen.idx import convert_idx

        return convert_idx(
            images,
            labels,
            path,
            test_images=test_images,
            test_labels=test_labels,
            force=force,
            progress=progress,
        )

    _write_and_tell(path, write)


def _write_and_tell(path: Path, write: Callable[[Progress], GenerateResult]) -> None:
    try:
        with report_progress(f"writing {path.name}") as progress:
            result = write(progress)
    except ModuleNotFoundError as error:
        raise RequestError(
            f"writing {path} needs {error.name}, which is not installed; pip install 'ddp-hpc[train]'"
        ) from error
    size = format_bytes(result.num_bytes)
    if result.reused:
        click.echo(f"{size} with the same recipe are there already: used as they are", err=True)
    else:
        click.echo(f"{size} written in {result.elapsed_s:.2f} s", err=True)
    click.echo(str(result.path))


def main() -> None:
    """Run the command line; errors end in one line on stderr and the exit code of their class."""
    try:
        code = cli.main(prog_name="python -m data_gen", standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"error: {' '.join(error.format_message().split())}", err=True)
        code = error.exit_code
    except DdpHpcError as error:
        click.echo(f"error: {error}", err=True)
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted: nothing was written", err=True)
        code = EXIT_INTERRUPTED
    sys.exit(code)
