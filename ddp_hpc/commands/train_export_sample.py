"""The commands `ddp-hpc train`, `export` and `sample`, which run the modules `ddp_hpc.NAME`."""

from __future__ import annotations

import gc
from importlib import import_module

import click


def entry(name: str, help_text: str) -> click.Command:
    """Returns a command that passes all its arguments to `main` of the module `ddp_hpc.NAME`."""

    @click.command(
        name, help=help_text, add_help_option=False, context_settings={"ignore_unknown_options": True}
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: tuple[str, ...]) -> None:
        gc.enable()  # ddp_hpc.cli disables it, since most commands run for only a tenth of a second
        import_module(f"ddp_hpc.{name}").main(list(arguments))

    return command
