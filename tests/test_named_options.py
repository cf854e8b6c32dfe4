"""Messages, help texts and docstrings name only options that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module

import click

from ddp_hpc.cli import cli
from tests.conftest import PROJECT

OTHERS = ("ddp_hpc.train.command", "ddp_hpc.export.command", "ddp_hpc.sample.command")
OTHERS += ("ddp_hpc.job.cli", "data_gen.cli.cli")
# These packages name options of schedulers and launchers.
SKIPPED = ("ddp_hpc/lint/", "ddp_hpc/rehearse/", "ddp_hpc/schedulers/")
# Options of sbatch, srun, mpiexec, torchrun, docker, nvidia-smi, py-spy, ddp_hpc.torchrun.endpoint, and the
# prefix `--no-`.
FOREIGN = {
    *(
        "--bind-to",
        "--chdir",
        "--container-image",
        "--cpu-bind",
        "--cpus-per-task",
        "--exclude",
        "--exclusive",
        "--format",
    ),
    *(
        "--gpus-per-task",
        "--help",
        "--hostfile",
        "--ipc",
        "--kill-on-bad-exit",
        "--map-by",
        "--nnodes",
        "--no-",
    ),
    *("--no-kill", "--nproc-per-node", "--ntasks", "--ntasks-per-node", "--pmi", "--ppn", "--query-gpu"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rendezvous", "--shm-size", "--tasks-per-node", "--timeout-s"),
    *("--full-filenames", "--nonblocking", "--pid", "--standalone"),
    *("--virtual-local-rank", "--nv", "--np", "--nrs", "--npernode", "--rs", "--tasks", "--switches"),
    *(
        "--check-hash-based-pycs",
        "--deadline",
        "--label",
        "--rdzv-id",
        "--rdzv-conf",
        "--local-addr",
        "--max-restarts",
    ),
}


def options(command: click.Command) -> Iterator[str]:
    """The options of a command and of its subcommands."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            yield from options(subcommand)


def test_every_option_that_a_text_names_exists() -> None:
    known = {*options(cli), *FOREIGN}
    for other in OTHERS:
        module, _, name = other.rpartition(".")
        known |= {*options(getattr(import_module(module), name))}
    unknown = []
    for path in (*PROJECT.glob("ddp_hpc/**/*.py"), *PROJECT.glob("data_gen/**/*.py")):
        where = path.relative_to(PROJECT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and not where.startswith(SKIPPED)
            ):
                named = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", node.value)
                unknown += [f"{where}:{node.lineno}: {word}" for word in named if word not in known]
    assert unknown == []
