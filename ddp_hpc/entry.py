"""Conversion of errors to one line on stderr and an exit code, for `python -m ddp_hpc.NAME`."""

from __future__ import annotations

import click

from ddp_hpc.errors import EXIT_DONE, EXIT_INTERRUPTED, DdpHpcError


def exit_code_of(command: click.Command, prog_name: str, argv: list[str] | None) -> int:
    """Runs the command, prints its error, and returns its exit code."""
    try:
        command.main(args=argv, prog_name=prog_name, standalone_mode=False)
    except click.exceptions.Exit as stop:  # raised by --help and --version
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except DdpHpcError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    return EXIT_DONE
