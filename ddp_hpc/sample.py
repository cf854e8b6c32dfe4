"""`python -m ddp_hpc.sample`: generates text with a byte-level decoder from a snapshot."""

from __future__ import annotations

import ast
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from ddp_hpc.errors import EXIT_FAILED, DataError, DdpHpcError, RequestError
from ddp_hpc.errors_to_exit_codes import exit_code_of
from ddp_hpc.version import __version__

if TYPE_CHECKING:
    from ddp_hpc.training.snapshots.snapshot_files import Snapshot
    from ddp_hpc.training.tasks.decoder import Decoder

# `python -m data_gen text` writes this byte after each file, so a new file begins after it.
_END_OF_FILE = b"\0"
_NUM_BYTES = 256
_EXAMPLES = """\b
Examples:
  python -m ddp_hpc.sample runs/ddp/snapshots --prompt "def "
  python -m ddp_hpc.sample runs/ddp/snapshots/step_00000120 --num-bytes 2000 --seed 7
  python -m ddp_hpc.sample runs/ddp/snapshots --temperature 0
"""


@click.command(epilog=_EXAMPLES, context_settings={"max_content_width": 100, "show_default": True})
@click.argument("snapshot", type=click.Path(path_type=Path))
@click.option(
    "--prompt",
    default="",
    help="Text that the decoder continues. If it is empty, the decoder generates the beginning of a file.",
)
@click.option("--num-bytes", type=int, default=400, help="Number of bytes to generate after the prompt.")
@click.option(
    "--temperature",
    type=float,
    default=0.8,
    help="Sampling temperature: values below 1 favor likely bytes; 0 always selects the most likely byte.",
)
@click.option("--seed", type=int, default=0, help="Random seed; the same seed gives the same text.")
@click.version_option(__version__, prog_name="ddp-hpc")
def command(snapshot: Path, prompt: str, num_bytes: int, temperature: float, seed: int) -> None:
    """Print a prompt and the text with which the decoder in SNAPSHOT continues it.

    SNAPSHOT is a directory such as step_00000120, or a directory of snapshots (the newest is used).
    The decoder must have been trained with `--model decoder` on a file that `python -m data_gen text`
    created.
    """
    if num_bytes < 1:
        raise RequestError(f"--num-bytes must be greater than 0 (got {num_bytes})")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise RequestError(f"--temperature must be 0 or greater (got {temperature})")
    if not 0 <= seed < 2**63:
        raise RequestError(f"--seed must be at least 0 and less than 2**63 (got {seed})")
    import torch

    from ddp_hpc.training.snapshots.snapshot_files import naming_the_previous, read_named

    # Several threads would not generate a byte faster, and the text must not depend on the number of threads.
    torch.set_num_threads(1)
    read = read_named(snapshot)
    with naming_the_previous(read.path):
        model = load_decoder(read)
    start = os.fsencode(prompt)
    out = sys.stdout.buffer
    out.write(start)
    for byte in generate(model, start, num_bytes, temperature, seed):
        out.write(byte)
        out.flush()


def load_decoder(snapshot: Snapshot) -> Decoder:
    """Loads a byte-level decoder from a snapshot, on the CPU.

    Raises:
        DataError: the snapshot is from another model, or the tokens are not bytes.
    """
    from ddp_hpc.training.snapshots.earlier_layout import rearranged
    from ddp_hpc.training.snapshots.snapshot_files import specs_of_saved
    from ddp_hpc.training.tasks.decoder import Decoder, decoder
    from ddp_hpc.training.tasks.task import SampleSpec

    name = snapshot.about.get("model")
    if name != "decoder":
        raise DataError(
            f"{snapshot.path} contains the model {name}, but must contain a decoder; use a "
            "snapshot of a run with --model decoder"
        )
    try:
        num_tokens, length = (
            len(snapshot.model[f"embedding.{part}.weight"]) for part in ("tokens", "positions")
        )
        spec = SampleSpec((length,), (length,), num_tokens)
        options = dict(ast.literal_eval(snapshot.about["config"]["model_options"]))
        task = decoder(spec, 0.0, **options)
        assert task.earlier_layout is not None
        layout = task.earlier_layout(specs_of_saved(snapshot.model))
        task.model.load_state_dict(rearranged(snapshot.model, layout))
    except (KeyError, TypeError, ValueError, SyntaxError, RuntimeError) as error:
        raise DataError(
            f"{snapshot.path} does not match the decoder of this version of ddp-hpc; use the version that "
            "trained it"
        ) from error
    if num_tokens != _NUM_BYTES:
        raise DataError(
            f"{snapshot.path} was trained on a vocabulary of {num_tokens} tokens, not on bytes; train on a "
            "file that `python -m data_gen text` created"
        )
    assert isinstance(task.model, Decoder)
    return task.model


def generate(model: Decoder, prompt: bytes, num_bytes: int, temperature: float, seed: int) -> Iterator[bytes]:
    """Yields the generated bytes one at a time, each predicted from the last `model.length` bytes.

    Raises:
        DdpHpcError: the output of the model is not finite.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    text = list(prompt or _END_OF_FILE)
    for _ in range(num_bytes):
        with torch.inference_mode():
            scores = model(torch.tensor([text[-model.length :]]))[0, -1].double()  # (256,)
            if not scores.isfinite().all():
                raise DdpHpcError(
                    "the model's output is not finite because the training diverged; use an earlier snapshot"
                )
            if temperature:
                chances = ((scores - scores.max()) / temperature).softmax(0)
                byte = int(torch.multinomial(chances, 1, generator=generator))
            else:
                byte = int(scores.argmax())
        text.append(byte)
        yield bytes([byte])


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs the command and ends the process with its exit code."""
    try:
        code = exit_code_of(command, "python -m ddp_hpc.sample", argv)
    except OSError as error:
        click.echo(f"error: cannot write the text ({error.strerror}); free disk space", err=True)
        code = EXIT_FAILED
        # Otherwise, Python would flush stdout again at exit, and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


if __name__ == "__main__":
    main()
