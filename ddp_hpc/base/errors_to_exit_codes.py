"""Converts errors to one line on stderr and an exit code."""

from __future__ import annotations

import click

from ddp_hpc.base.errors import EXIT_DONE, EXIT_INTERRUPTED, DdpHpcError


def exit_code_of(command: click.Command, prog_name: str, argv: list[str] | None) -> int:
    """Runs the command, prints an error if it fails, and returns the exit code."""
    try:
        # A number is the argument of `context.exit`, which --help and --version also call.
        code = command.main(args=argv, prog_name=prog_name, standalone_mode=False)
        return code if isinstance(code, int) else EXIT_DONE
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except DdpHpcError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
