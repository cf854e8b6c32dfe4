"""`ddp-hpc train`, `export` and `sample`: the same entries as `python -m ddp_hpc.train` and so on."""

from __future__ import annotations

import gc
from importlib import import_module

import click


def entry(name: str, help_text: str) -> click.Command:
    """A command that passes all its arguments on to `main` of that module."""

    @click.command(
        name, help=help_text, add_help_option=False, context_settings={"ignore_unknown_options": True}
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: tuple[str, ...]) -> None:
        gc.enable()  # ddp-hpc runs without it, as its other commands take a tenth of a second
        import_module(f"ddp_hpc.{name}").main(list(arguments))

    return command
