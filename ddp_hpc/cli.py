"""The program `ddp-hpc` and its commands. The module of a command is imported when the command is used."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module

import click

from ddp_hpc.base.errors import EXIT_FAILED, RequestError, nearest
from ddp_hpc.base.errors_to_exit_codes import exit_code_of
from ddp_hpc.base.version import __version__

_EPILOG = """\b
Shell completion, for bash (zsh and fish likewise):
  eval "$(_DDP_HPC_COMPLETE=bash_source ddp-hpc)"
"""

# Modules in ddp_hpc/commands/, and their descriptions in `ddp-hpc --help`, which imports none of them.
_COMMANDS = {
    "render": "Write a job script for PBS, Slurm or this machine.",
    "lint": "Check a job script before it is submitted.",
    "submit": "Submit a job script, or the script for the options of a job.",
    "status": "Show the progress of a job, or why it ended and what to do next.",
    "logs": "Print the log of a job, and follow it while the job runs.",
    "cancel": "Cancel a job or a job array.",
    "profiles": "List, show and check site profiles.",
    "launch": "Start ranks in the current allocation, or on this machine.",
    "exec": "Start any program as a rank, with the variables of torchrun.",
    "rehearse": "Run a job script on this machine, with stand-ins for its scheduler and launcher.",
    "train": "Train a model on the ranks that a launcher started.",
    "export": "Write the model of a snapshot to a file for plain torch.",
    "sample": "Generate text with a decoder from a snapshot.",
    "env": "Show rank, world size and address of this process, and the source of each value.",
    "doctor": "Check the environment before submitting a job.",
    "report": "Report where the time of a training run was spent.",
    "bench": "Run benchmarks of data loading, communication and scaling.",
    "estimate": "Estimate the memory per rank that training a Transformer takes.",
}

# These commands also run as `python -m ddp_hpc.NAME`.
_ENTRIES = ("train", "export", "sample")


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in _COMMANDS:
            return None
        if cmd_name in _ENTRIES:
            from ddp_hpc.commands.train_export_sample import entry

            return entry(cmd_name, _COMMANDS[cmd_name])
        command: click.Command = import_module(f"ddp_hpc.commands.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and args[0] not in _COMMANDS:
            hint = nearest(args[0], list(_COMMANDS))
            raise RequestError(f"{args[0]!r} is not a command{hint}; see ddp-hpc --help")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(
    cls=_Commands,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="ddp-hpc")
def cli() -> None:
    """Run PyTorch jobs on PBS and Slurm machines: render job scripts, detect ranks, train, and analyze."""


def _say(line: str) -> None:
    click.echo(line, err=True)


def main() -> None:
    """Runs `ddp-hpc`; prints an error as one line on stderr and ends the process with its exit code."""
    # Garbage collection takes 3 % of the run time of a short command and frees little memory.
    gc.disable()
    if sys.stdout is None:
        _say("error: stdout is closed; leave it open, or write to a file")
        sys.exit(EXIT_FAILED)
    try:
        code = exit_code_of(cli, "ddp-hpc", None)
        sys.stdout.flush()
    except OSError as err:
        code = EXIT_FAILED
        if err.filename is not None:
            _say(f"error: {err.filename}: {err.strerror}")
        else:
            # Discard the buffered output: otherwise Python would write it again at exit, and fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if not isinstance(err, BrokenPipeError):  # raised if the reader, such as `head`, has exited
                _say(f"error: cannot write the output ({err.strerror}); write it to a disk with free space")
    if "torch" not in sys.modules:  # whose objects may have to be finalized
        # Otherwise, Python would search all objects for cycles at exit, in a tenth of the time of `render`.
        gc.freeze()
    sys.exit(code)
