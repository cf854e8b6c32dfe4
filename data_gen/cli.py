"""Command line of data_gen. NumPy, h5py and torch are imported only to write a file, not for --help."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from data_gen.progress import shown_progress
from data_gen.recipe import DISTRIBUTIONS, DTYPE_BYTES, Recipe, default_file_name, parse_shape
from ddp_hpc.base.errors import EXIT_DONE, EXIT_INTERRUPTED, DdpHpcError, RequestError
from ddp_hpc.base.option_names import on_command_line
from ddp_hpc.base.pip_extras import install_command
from ddp_hpc.base.units import format_bytes
from ddp_hpc.base.version import __version__
from ddp_hpc.discovery.launcher_environment import Environ, peek_rank, present_launchers, read_launcher_values

if TYPE_CHECKING:
    from data_gen.writer import GenerateResult, Progress

_DEFAULT = Recipe()
_DIRECTORY = Path("data")

_output_option = click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Output file; its suffix selects the format: .h5, .hdf5, .pt or .safetensors.",
)
_force_option = click.option("--force", is_flag=True, help="Overwrite the output file if it exists.")
_seed_option = click.option("--seed", type=int, default=0, help="Random seed.")


def _shape(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    return parse_shape(text)


def _shape_option(name: str, default: tuple[int, ...]) -> Callable[[Any], Any]:
    return click.option(
        f"--{name}-shape",
        callback=_shape,
        default=",".join(map(str, default)),
        metavar="N,N,...",
        help=f"Shape of one sample of {name}.",
    )


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.option("--num-samples", type=int, default=_DEFAULT.num_samples, help="Number of samples to write.")
@_shape_option("src", _DEFAULT.src_shape)
@_shape_option("tgt", _DEFAULT.tgt_shape)
@click.option(
    "--dtype", type=click.Choice(list(DTYPE_BYTES)), default=_DEFAULT.dtype, help="Data type of src and tgt."
)
@click.option(
    "--distribution",
    type=click.Choice(list(DISTRIBUTIONS)),
    default=_DEFAULT.distribution,
    help="Distribution of the values. uniform: values in [0, 1). learnable: tgt is a fixed linear "
    "map of src plus small noise.",
)
@_seed_option
@_output_option
@_force_option
@click.version_option(__version__, prog_name="data_gen")
@click.pass_context
def cli(context: click.Context, /, output: Path | None, force: bool, **fields: Any) -> None:
    """Write a data file for training. If no command is given, the file contains synthetic data.

    An existing file with the same contents is reused. If any other file exists, the program ends with an
    error, unless --force is given. The path of the file is printed to stdout, and everything else to stderr.

    \b
    python -m data_gen
        data/synthetic-2048-1x512-20x512-float32-seed0-dc1ba503.h5, 84.0 MiB
    python -m data_gen --src-shape 20 --tgt-shape 1 --distribution learnable
        for --model linear
    python -m data_gen digits
        real images, with a test split, for --model classifier
    python -m data_gen text book.txt
        bytes of text, for --model decoder
    """  # noqa: D301 - click does not rewrap the paragraph after a real \b
    if context.invoked_subcommand is not None:
        for option in context.params:
            if context.get_parameter_source(option) == ParameterSource.COMMANDLINE:
                raise click.UsageError(
                    f"{on_command_line(option)} before {context.invoked_subcommand} applies only to "
                    f"synthetic data; put options for {context.invoked_subcommand} after that word"
                )
        return
    recipe = Recipe(**fields)
    path = output or _DIRECTORY / default_file_name(recipe)
    with _writing(path) as progress:
        from data_gen.synthetic import generate

        result = generate(recipe, path, force=force, progress=progress)
    _print(result)


@cli.command()
@_seed_option
@_output_option
@_force_option
def digits(seed: int, output: Path | None, force: bool) -> None:
    """Write the handwritten digits of scikit-learn: 1,797 images of 8 x 8 pixels, one fifth of them for
    testing.

    \b
    python -m data_gen digits                           data/digits.h5
    python -m data_gen digits --output digits.pt
    """  # noqa: D301 - click does not rewrap the paragraph after a real \b
    path = output or _DIRECTORY / "digits.h5"
    with _writing(path) as progress:
        from data_gen.digits import write_digits

        result = write_digits(path, seed=seed, force=force, progress=progress)
    _print(result)


@cli.command()
@click.argument("inputs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--length", type=int, default=128, help="Number of bytes per sample.")
@click.option("--test-share", type=float, default=0.05, help="Fraction of the samples used for testing.")
@_output_option
@_force_option
def text(inputs: tuple[Path, ...], output: Path | None, **options: Any) -> None:
    """Convert text files to samples of bytes for --model decoder.

    src is a window of --length bytes, and tgt is the same window shifted by one byte. The files are sorted by
    path, and a zero byte marks the end of each file. The test samples are ten separate sections of the text,
    which share no byte with the training samples.

    \b
    python -m data_gen text book.txt                            data/text.h5
    python -m data_gen text $(git ls-files src) -o sources.h5
    """  # noqa: D301 - click does not rewrap the paragraph after a real \b
    path = output or _DIRECTORY / "text.h5"
    with _writing(path) as progress:
        from data_gen.text import write_text

        result = write_text(inputs, path, **options, progress=progress)
    _print(result)


@cli.command()
@click.argument("inputs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="INPUT...")
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--src-key",
    default="src",
    help="Name of the array to read as src, if INPUT is one file with both arrays.",
)
@click.option(
    "--tgt-key",
    default="tgt",
    help="Name of the array to read as tgt, if INPUT is one file with both arrays.",
)
@_force_option
def convert(inputs: tuple[Path, ...], output: Path, **options: Any) -> None:
    """Convert HDF5, .pt, .safetensors, .npy and .npz files to HDF5, .pt or .safetensors.

    INPUT is one file with both arrays (.h5, .hdf5, .pt, .safetensors or .npz), or two .npy files with one
    array each, src first. The suffix of OUTPUT selects the format. A test split is preserved.

    \b
    python -m data_gen convert images.npy labels.npy train.h5
    python -m data_gen convert --src-key x --tgt-key y theirs.npz train.safetensors
    python -m data_gen convert train.h5 train.pt
    """  # noqa: D301 - click does not rewrap the paragraph after a real \b
    with _writing(output) as progress:
        from data_gen.convert import convert

        result = convert(inputs, output, **options, progress=progress)
    _print(result)


@contextmanager
def _writing(path: Path) -> Iterator[Progress]:
    """Yields a callback that shows the progress of writing; reports a library that is missing."""
    _refuse_several_ranks(os.environ)
    try:
        with shown_progress(f"writing {path.name}") as progress:
            yield progress
    except ModuleNotFoundError as error:
        raise RequestError(
            f"writing {path} requires {error.name}, which is not installed; run {install_command('train')}"
        ) from error


def _print(result: GenerateResult) -> None:
    size = format_bytes(result.num_bytes)
    if result.reused:
        click.echo(f"reusing the existing file with the same contents ({size})", err=True)
    else:
        click.echo(f"{size} written in {result.elapsed_s:.2f} s", err=True)
    click.echo(str(result.path))


def _refuse_several_ranks(environ: Environ) -> None:
    """Raises RequestError if a launcher has started several processes, which would all write the file."""
    for launcher in present_launchers(environ)[:1]:
        num_ranks = read_launcher_values(launcher, environ).world_size
        if num_ranks != 1:
            raise RequestError(
                f"{launcher.title} started {num_ranks or 'several'} ranks, but data_gen writes a file with "
                "one process; run it without a launcher. (A training writes synthetic data itself.)"
            )


def send_again(ignored: sys.UnraisableHookArgs) -> None:
    """Sends a signal again whose exception Python has dropped, because it was raised in a callback of h5py's
    weak references.
    """
    if isinstance(ignored.exc_value, KeyboardInterrupt | SystemExit):
        number = signal.SIGINT if isinstance(ignored.exc_value, KeyboardInterrupt) else signal.SIGTERM
        # Later, because this function is called in the same callback.
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    else:
        sys.__unraisablehook__(ignored)


def main() -> None:
    """Runs the command. For an error, prints one line on stderr and ends with the exit code of its class."""
    code, line = EXIT_DONE, ""
    # An exception removes the partial file.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.unraisablehook = send_again
    try:
        code = cli.main(prog_name="python -m data_gen", standalone_mode=False)
    except click.ClickException as error:
        code, line = error.exit_code, f"error: {' '.join(error.format_message().split())}"
    except DdpHpcError as error:
        code, line = error.exit_code, f"error: {error}"
    except (click.Abort, KeyboardInterrupt):
        code, line = EXIT_INTERRUPTED, "interrupted: nothing was written"
    # If a launcher has started several ranks, all of them fail, and only rank 0 prints the error.
    if line and peek_rank(os.environ) == 0:
        click.echo(line, err=True)
    sys.exit(code)
